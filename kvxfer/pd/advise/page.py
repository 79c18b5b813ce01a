"""A page of metrics: the Prometheus text format 0.0.4, read within bounds.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kvxfer.errors import ProtocolMismatch

MAX_PAGE_BYTES: Final = 16 << 20
MAX_SAMPLES: Final = 200_000

Labels = tuple[tuple[str, str], ...]

_SAMPLE: Final = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[^\"{}]|\"(?:[^\"\\]|\\.)*\")*)\})?\s+(\S+)(?:\s+-?[0-9]+)?"
)
_LABEL: Final = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPED: Final = re.compile(r"\\(.)")
_UNESCAPED: Final = {"n": "\n"}
# What only grows while a process lives; a sum may hold negative values, so it is not among them.
_GROWING: Final = ("_total", "_count", "_bucket")
_START: Final = "process_start_time_seconds"
_START_SLACK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Page:
    """Samples by name, and by their labels in alphabetical order."""

    samples: Mapping[str, Mapping[Labels, float]]

    def has(self, name: str) -> bool:
        """Whether there is a sample of that name."""
        return name in self.samples

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels; 0 where there is none."""
        return sum(value for _, value in self.of(name, **labels))

    def of(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """The samples that have these labels."""
        for own, value in self.samples.get(name, {}).items():
            found = dict(own)
            if labels.items() <= found.items():
                yield found, value

    def restarted_since(self, earlier: "Page") -> bool:
        """Whether a process behind it began anew: its start is another, or a counter fell."""
        starts = [page.samples.get(_START, {}) for page in (earlier, self)]
        if any(
            abs(starts[1].get(labels, value) - value) > _START_SLACK_S
            for labels, value in starts[0].items()
        ):
            return True
        return any(
            value > self.samples.get(name, {}).get(labels, 0.0)
            for name, samples in earlier.samples.items()
            if name.endswith(_GROWING)
            for labels, value in samples.items()
        )


def parse_page(text: str) -> Page:
    """Read a page; comments are skipped.

    Raises:
        ProtocolMismatch: it is too large, or a line is no sample.
    """
    if len(text) > MAX_PAGE_BYTES:
        raise ProtocolMismatch(
            f"the page of metrics is above {MAX_PAGE_BYTES} bytes; is the URL right?"
        )
    samples: dict[str, dict[Labels, float]] = {}
    num_samples = 0
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, labels, value = _sample(line, number)
        samples.setdefault(name, {})[labels] = value
        num_samples += 1
        if num_samples > MAX_SAMPLES:
            raise ProtocolMismatch(f"the page of metrics has more than {MAX_SAMPLES} samples")
    return Page(samples)


def _sample(line: str, number: int) -> tuple[str, Labels, float]:
    match = _SAMPLE.fullmatch(line)
    try:
        if match is None:
            raise ValueError
        return match[1], _labels(match[2] or ""), float(match[3])
    except ValueError as error:
        raise ProtocolMismatch(
            f"line {number} of the page of metrics is no sample: {line[:80]!r}; "
            "give the URL of /metrics"
        ) from error


def _labels(text: str) -> Labels:
    found = {}
    at = 0
    while at < len(text.rstrip()):
        match = _LABEL.match(text, at)
        if match is None:
            raise ValueError(text)
        found[match[1]] = _ESCAPED.sub(lambda it: _UNESCAPED.get(it[1], it[1]), match[2])
        at = match.end()
    return tuple(sorted(found.items()))
