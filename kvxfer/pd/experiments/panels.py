"""From a run to figures and tables that several experiments share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvxfer.pd.experiment_result import (
    MAX_SERIES,
    Axis,
    Cell,
    Column,
    Curve,
    Curves,
    Distributions,
    Figure,
    How,
    Limit,
    Panel,
    Samples,
    Table,
)
from kvxfer.pd.summary import Distribution, Load, PointSummary, RunSummary, SetupSummary

HowOf = Callable[[SetupSummary], How]


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a point; ``unit`` as in a table's head."""

    name: str
    unit: str
    value: Callable[[PointSummary], float]


def holds_from(held: Sequence[bool]) -> int:
    """From which place on everything holds, to the last; their number where the last does not."""
    start = len(held)
    while start and held[start - 1]:
        start -= 1
    return start


@dataclass(frozen=True, slots=True)
class Kind:
    """One distribution of a point, and its axis."""

    name: str
    axis: str
    of: Callable[[PointSummary], Distribution]
    tail: bool


ITL: Final = Kind("ITL", "gap between tokens, ms", lambda point: point.itl, tail=True)
TTFT: Final = Kind("TTFT", "time to the first token, ms", lambda point: point.ttft, tail=False)
METRICS: Final = (
    Metric("TTFT P50", "ms", lambda point: point.ttft.percentile(50)),
    Metric("TTFT P99", "ms", lambda point: point.ttft.percentile(99)),
    Metric("ITL P50", "ms", lambda point: point.itl.percentile(50)),
    Metric("ITL P99", "ms", lambda point: point.itl.percentile(99)),
    Metric("requests", "1/s", lambda point: point.requests_per_s),
    Metric("output", "tokens/s", lambda point: point.output_tokens_per_s),
)
TTFT_P50, TTFT_P99, ITL_P50, ITL_P99 = METRICS[:4]


def cdf_by_concurrency(
    run: RunSummary, load: Load, kind: Kind, *, name: str, caption: str, how: HowOf
) -> Figure | None:
    """A panel a set-up, a line a concurrency; None where no point has such times."""
    chosen = _spread(run.concurrencies(load))
    panels: list[Panel] = []
    for one in run.serving:
        points = ((value, one.at(load, value)) for value in chosen)
        series = [
            Samples.of(str(value), kind.of(point), how(one))
            for value, point in points
            if point is not None and len(kind.of(point))
        ]
        if series:
            panels.append(
                Distributions(title=one.setup.name, axis=kind.axis, series=series, tail=kind.tail)
            )
    return Figure(name=name, caption=caption, panels=panels) if panels else None


def cdf_by_setup(
    run: RunSummary, load: Load, concurrency: int, *, name: str, caption: str, how: HowOf
) -> Figure | None:
    """TTFT and ITL of all set-ups over each other, at one concurrency; the first six of them."""
    panels: list[Panel] = []
    for kind in (TTFT, ITL):
        series = [
            Samples.of(one.setup.name, kind.of(point), how(one))
            for one in run.serving
            if (point := one.at(load, concurrency)) is not None and len(kind.of(point))
        ][:MAX_SERIES]
        if series:
            panels.append(
                Distributions(title=kind.name, axis=kind.axis, series=series, tail=kind.tail)
            )
    return Figure(name=name, caption=caption, panels=panels, key=True) if panels else None


def against_concurrency(
    run: RunSummary, load: Load, metric: Metric, how: HowOf, limits: Sequence[Limit] = ()
) -> Curves | None:
    """A line a set-up; None where fewer than two concurrencies were measured."""
    concurrencies = run.concurrencies(load)
    if len(concurrencies) < 2:
        return None
    series = []
    for one in run.serving[:MAX_SERIES]:
        points = [(c, point) for c in concurrencies if (point := one.at(load, c)) is not None]
        pairs = [(c, metric.value(point)) for c, point in points]
        pairs = [(c, value) for c, value in pairs if not np.isnan(value)]
        if pairs:
            series.append(
                Curve(one.setup.name, [float(c) for c, _ in pairs], [y for _, y in pairs], how(one))
            )
    if not series:
        return None
    return Curves(
        title=f"{metric.name} against load",
        x=Axis("requests in flight", "log", [float(c) for c in concurrencies]),
        y=Axis(f"{metric.name}, {metric.unit}", "log"),
        series=series,
        limits=list(limits),
    )


def point_table(run: RunSummary, load: Load, title: str, how: HowOf) -> Table:
    """A row a set-up and concurrency, a column a metric."""
    columns = [
        Column("set-up"),
        Column("devices"),
        Column("in flight"),
        *(Column(one.name, one.unit) for one in METRICS),
        Column("how"),
    ]
    rows: list[list[Cell]] = []
    for concurrency in run.concurrencies(load):
        for one in run.serving:
            point = one.at(load, concurrency)
            if point is not None:
                figures = [number(metric.value(point)) for metric in METRICS]
                head: list[Cell] = [
                    one.setup.name,
                    float(one.setup.num_devices),
                    float(concurrency),
                ]
                rows.append([*head, *figures, how(one)])
    return Table(title=title, columns=columns, rows=rows)


def number(value: float) -> float | None:
    """A cell: None where there is no figure."""
    return None if np.isnan(value) else float(value)


def _spread(values: list[int]) -> list[int]:
    """At most ``MAX_SERIES`` of them, the first and the last among them."""
    if len(values) <= MAX_SERIES:
        return values
    at = np.linspace(0, len(values) - 1, MAX_SERIES).round().astype(int)
    return [values[index] for index in at]
