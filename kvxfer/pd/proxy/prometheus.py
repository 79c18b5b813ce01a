"""Counters, gauges and histograms as Prometheus reads them (text format 0.0.4)."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[str, ...]
Values = Iterable[tuple[Labels, float]]


class Metric(Protocol):
    """Something with lines of its own."""

    def lines(self) -> Iterator[str]:
        """All of them, the comments before the samples."""


class Counter:
    """Counts up, for each set of label values."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        self._name, self._help, self._labels = name, help_text, labels
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, *labels: str, by: float = 1.0) -> None:
        """Count ``by`` more under these label values."""
        self._values[labels] = self._values.get(labels, 0.0) + by

    def lines(self) -> Iterator[str]:
        """As `Metric`."""
        yield from _head(self._name, self._help, "counter")
        for values, count in self._values.items():
            yield f"{self._name}{_braces(self._labels, values)} {_number(count)}"


class Reading:
    """A counter that is kept elsewhere: what ``read`` says when somebody looks."""

    kind = "counter"

    def __init__(
        self, name: str, help_text: str, labels: Sequence[str], read: Callable[[], Values]
    ) -> None:
        self._name, self._help, self._labels, self._read = name, help_text, labels, read

    def lines(self) -> Iterator[str]:
        """As `Metric`."""
        yield from _head(self._name, self._help, self.kind)
        for values, value in self._read():
            yield f"{self._name}{_braces(self._labels, values)} {_number(value)}"


class Gauge(Reading):
    """The same, of what goes up and down."""

    kind = "gauge"


class Tally:
    """How often values were up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def blank(self) -> "Tally":
        """One of nothing yet, with the same bounds."""
        return Tally(self._bounds)

    def add(self, other: "Tally") -> None:
        """Count all that ``other`` has, which is of the same bounds."""
        self._counts = [mine + its for mine, its in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum


class Histogram(Tally):
    """A tally with a name."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        super().__init__(bounds)
        self._name, self._help = name, help_text

    def lines(self) -> Iterator[str]:
        """As `Metric`."""
        yield from _head(self._name, self._help, "histogram")
        total = 0
        bounds = [*map("{:g}".format, self._bounds), "+Inf"]
        for bound, count in zip(bounds, self._counts, strict=True):
            total += count
            yield f'{self._name}_bucket{{le="{bound}"}} {total}'
        yield f"{self._name}_sum {_number(self._sum)}"
        yield f"{self._name}_count {total}"


def exposition(metrics: Iterable[Metric]) -> str:
    """The page that Prometheus reads."""
    return "".join(f"{line}\n" for metric in metrics for line in metric.lines())


def _head(name: str, help_text: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"


def _number(value: float) -> str:
    """All digits that count: readers subtract large values from each other."""
    return f"{value:.15g}"


def _braces(names: Sequence[str], values: Labels) -> str:
    pairs = ",".join(f'{n}="{_escape(v)}"' for n, v in zip(names, values, strict=True))
    return f"{{{pairs}}}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
