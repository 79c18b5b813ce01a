"""What an experiment found, as the report reads it: schema ``kvxfer.pd-experiment/1``.

Tables with named columns, panels with their series, findings in words, and for each of them where
it comes from. The record stands alone: a page can be made of it without the runs behind it. Fields
are only ever added within version 1.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from kvxfer.errors import InvalidUsage
from kvxfer.pd.summary import Distribution
from kvxfer.whole_file import read_bounded, write_whole

SCHEMA: Final = "kvxfer.pd-experiment/1"
RESULT_FILE: Final = "experiment.json"
MAX_SERIES: Final = 6
"""Lines in a panel; more cannot be told apart."""
MAX_SAMPLES: Final = 4000
"""Of a distribution that are kept: enough for P99.9."""
MAX_RESULT_BYTES: Final = 64 << 20

How: TypeAlias = Literal["measured", "simulated", "recorded", "computed"]
"""``measured`` by this run; ``recorded``: measured by an earlier one; ``simulated`` by the
planner's model of an engine; ``computed`` from sizes and rates."""
Scale: TypeAlias = Literal["linear", "log"]
Cell: TypeAlias = str | float | None


class Source(msgspec.Struct, frozen=True):
    """Where a part of the result comes from: ``what`` it is, and ``how`` it was got."""

    what: str
    how: How


class Said(msgspec.Struct, frozen=True):
    """A finding in words, worked out from the data, and how the data was got."""

    text: str
    how: How


class Column(msgspec.Struct, frozen=True):
    """A column of a table; ``unit`` is empty where its cells have none."""

    name: str
    unit: str = ""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of cells: text, a number in its column's unit, or None where there is no figure.

    ``how`` is None where a column says it of each row.

    Raises:
        ValueError: a row has more or fewer cells than there are columns.
    """

    title: str
    how: How | None = None
    columns: list[Column]
    rows: list[list[Cell]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r}: a row of {len(row)} cells under "
                    f"{len(self.columns)} columns"
                )


class Samples(msgspec.Struct, frozen=True):
    """One distribution: values in milliseconds, ascending."""

    label: str
    values_ms: list[float]
    how: How = "measured"

    @classmethod
    def of(cls, label: str, distribution: Distribution, how: How) -> "Samples":
        """A distribution, thinned evenly by rank to ``MAX_SAMPLES``, least and largest kept."""
        values_ms = distribution.values_ms
        count = len(values_ms)
        if count > MAX_SAMPLES:
            step = (count - 1) / (MAX_SAMPLES - 1)
            values_ms = values_ms[[round(at * step) for at in range(MAX_SAMPLES)]]
        return cls(label, [round(float(value), 4) for value in values_ms], how)


class Distributions(msgspec.Struct, frozen=True, kw_only=True, tag="distributions"):
    """Distribution functions on one pair of axes; ``tail`` stretches what is above the median."""

    title: str
    axis: str
    series: list[Samples]
    tail: bool = False

    def __post_init__(self) -> None:
        _check_series(self.title, self.series)


class Axis(msgspec.Struct, frozen=True):
    """What an axis shows, its unit in the text; ``ticks`` where the measured places are few."""

    text: str
    scale: Scale = "linear"
    ticks: list[float] = []


class Curve(msgspec.Struct, frozen=True):
    """A line through points ``(x, y)``.

    Raises:
        ValueError: there are not as many ``y`` as ``x``.
    """

    label: str
    x: list[float]
    y: list[float]
    how: How = "measured"

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"curve {self.label!r}: {len(self.x)} x and {len(self.y)} y")


class Limit(msgspec.Struct, frozen=True):
    """A horizontal line across a panel, such as an objective."""

    label: str
    y: float


class Curves(msgspec.Struct, frozen=True, kw_only=True, tag="curves"):
    """Lines over one pair of axes."""

    title: str
    x: Axis
    y: Axis
    series: list[Curve]
    limits: list[Limit] = []

    def __post_init__(self) -> None:
        _check_series(self.title, self.series)


class Bar(msgspec.Struct, frozen=True):
    """One bar: its parts in the panel's unit, in the order of ``Bars.parts``."""

    label: str
    values: list[float]
    how: How = "measured"


class Bars(msgspec.Struct, frozen=True, kw_only=True, tag="bars"):
    """Stacked bars, from the left: where a time goes.

    Raises:
        ValueError: a bar has more or fewer values than there are parts.
    """

    title: str
    axis: str
    parts: list[str]
    bars: list[Bar]

    def __post_init__(self) -> None:
        if not 1 <= len(self.parts) <= MAX_SERIES:
            raise ValueError(f"bars {self.title!r}: {len(self.parts)} parts; use 1 to {MAX_SERIES}")
        for bar in self.bars:
            if len(bar.values) != len(self.parts):
                raise ValueError(
                    f"bar {bar.label!r}: {len(bar.values)} values for {len(self.parts)} parts"
                )


Panel: TypeAlias = Distributions | Curves | Bars


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """Panels of one kind, drawn beside each other; ``name`` is that of its file.

    ``key``: the lines have one key below, instead of labels at each of them.

    Raises:
        ValueError: there is no panel, or kinds are mixed.
    """

    name: str
    caption: str
    panels: list[Panel]
    key: bool = False

    def __post_init__(self) -> None:
        if len({type(panel) for panel in self.panels}) != 1:
            raise ValueError(f"figure {self.name!r}: give panels, all of one kind")
        if not self.name.replace("-", "").isalnum() or not self.name.isascii():
            raise ValueError(f"figure {self.name!r}: a file's name of letters, digits and -")


class ExperimentResult(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment's outcome.

    Attributes:
        environment: versions, devices and the machine, by name.
        commands: that make it again.
        sources: which parts were measured, simulated, or read from records.
        faults: what of it cannot be taken as it is; a run that has any has failed.
    """

    schema: Literal["kvxfer.pd-experiment/1"] = "kvxfer.pd-experiment/1"
    name: str
    question: str
    scale: str
    made_at: str = ""  # ISO 8601, UTC
    environment: dict[str, str] = {}
    commands: list[str] = []
    sources: list[Source] = []
    findings: list[Said] = []
    tables: list[Table] = []
    figures: list[Figure] = []
    notes: list[str] = []
    faults: list[str] = []


def save_result(folder: Path, result: ExperimentResult) -> Path:
    """Write ``experiment.json`` into a folder, which is made where it is missing.

    Raises:
        InvalidUsage: it cannot be written.
    """
    return write_whole(folder / RESULT_FILE, msgspec.json.encode(result) + b"\n", make_folders=True)


def load_result(path: Path) -> ExperimentResult:
    """Read an ``experiment.json``.

    Raises:
        InvalidUsage: it cannot be read, or is not of the schema; names the field.
    """
    try:
        return msgspec.json.decode(read_bounded(path, MAX_RESULT_BYTES), type=ExperimentResult)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidUsage(f"{path} is not a record of an experiment: {error}") from error


def _check_series(title: str, series: Sequence[Samples] | Sequence[Curve]) -> None:
    if not 1 <= len(series) <= MAX_SERIES:
        raise ValueError(f"panel {title!r}: {len(series)} lines; use 1 to {MAX_SERIES}")
    for one in series:
        if not (one.values_ms if isinstance(one, Samples) else one.x):
            raise ValueError(f"panel {title!r}: the line {one.label!r} has no point")
