"""What is drawn of a benchmark of PD set-ups: distribution functions, side by side.

The articles' way: milliseconds across, the distribution function up, a colour a concurrency, a
panel a set-up, all on one scale; then the set-ups over each other under the heaviest load.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvxfer.pd.summary import Distribution, Load, PointSummary, RunSummary
from kvxfer.report.pd_cdf import Drawing, Line, Panel, draw, require_matplotlib

MAX_LINES = 6
SETUP_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe, Ito
_CONCURRENCY_COLOURS = ("#f2b134", "#8fbf5a", "#35a18a", "#2c7fb8", "#4b4a9c", "#3b0f52")


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing: ``name`` for a file, ``caption`` for a page."""

    name: str
    caption: str
    load: Load
    drawing: Drawing


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    axis: str
    of: Callable[[PointSummary], Distribution]
    tail: bool


_TTFT = _Kind("TTFT", "time to the first token, ms", lambda point: point.ttft, tail=False)
_FIRST = _Kind("first gap", "first to second token, ms", lambda point: point.first_gap, tail=False)
_LATER = _Kind("later gaps", "gap after the first, ms", lambda point: point.later_gaps, tail=True)
_ITL = _Kind("ITL", "gap between tokens, ms", lambda point: point.itl, tail=True)


def plots(run: RunSummary) -> Iterator[Plot]:
    """All drawings of a run, load by load.

    Raises:
        NotAvailable: matplotlib is not installed.
    """
    require_matplotlib()
    for load in run.loads():
        for kind in (_ITL, _TTFT, _FIRST):
            panels = list(_by_concurrency(run, load, kind))
            if panels:
                yield _plot(load, kind.name, _caption(kind, load), panels)
        panels = list(_side_by_side(run, load))
        if panels:
            most = run.concurrencies(load)[-1]
            caption = f"Set-ups at {most} concurrent requests, {load}"
            yield _plot(load, "setups", caption, panels, key=True)


def _caption(kind: _Kind, load: Load) -> str:
    name = kind.name[:1].upper() + kind.name[1:]
    return f"{name} by number of concurrent requests, {load}"


def _plot(load: Load, name: str, caption: str, panels: list[Panel], *, key: bool = False) -> Plot:
    rate = "" if load.request_rate is None else f"-r{load.request_rate:g}-b{load.burstiness:g}"
    trace = f"-t{load.trace}" if load.trace else ""
    file_name = f"i{load.isl}-o{load.osl}{rate}{trace}-{name.lower().replace(' ', '-')}"
    return Plot(file_name, caption, load, draw(caption, panels, key=key))


def _by_concurrency(run: RunSummary, load: Load, kind: _Kind) -> Iterator[Panel]:
    """A panel a set-up, a line a concurrency; of more than fit, some between least and most."""
    chosen = [int(value) for value in _spread(run.concurrencies(load))]
    colours = shades(len(chosen))
    for one in run.serving:
        points = ((value, one.at(load, value)) for value in chosen)
        lines = [
            Line(str(value), colours[chosen.index(value)], kind.of(point))
            for value, point in points
            if point is not None and len(kind.of(point))
        ]
        if lines:
            yield Panel(one.setup.name, kind.axis, lines, kind.tail)


def _side_by_side(run: RunSummary, load: Load) -> Iterator[Panel]:
    """Set-ups at the highest concurrency."""
    most = run.concurrencies(load)[-1]
    found = [(one.setup, one.at(load, most)) for one in run.serving]
    return side_by_side(
        [
            (setup.name, setup.kind == "aggregated", point)
            for setup, point in found
            if point is not None
        ]
    )


def side_by_side(points: Sequence[tuple[str, bool, PointSummary]]) -> Iterator[Panel]:
    """Three panels of the first ``MAX_LINES`` points under one load, a line a point.

    Args:
        points: name, whether its line is dashed (aggregated ones are), figures.
    """
    for kind in (_TTFT, _FIRST, _LATER):
        lines = [
            Line(name, colour, kind.of(point), dashed=dashed)
            for colour, (name, dashed, point) in zip(
                SETUP_COLOURS, points[:MAX_LINES], strict=False
            )
            if len(kind.of(point))
        ]
        if lines:
            yield Panel(kind.name, kind.axis, lines, kind.tail)


def _spread(values: list[int]) -> list[int]:
    """At most ``MAX_LINES`` of them, the first and the last among them."""
    if len(values) <= MAX_LINES:
        return values
    at = np.linspace(0, len(values) - 1, MAX_LINES).round().astype(int)
    return [values[index] for index in at]


def shades(count: int) -> list[str]:
    """From light to dark with the load, as far apart as they go."""
    at = np.linspace(len(_CONCURRENCY_COLOURS) - 1, 0, count).round().astype(int)
    return [_CONCURRENCY_COLOURS[index] for index in at[::-1]]
