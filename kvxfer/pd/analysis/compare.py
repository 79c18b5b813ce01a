"""Which set-up is better under which load, and from which percentile on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvxfer.pd.summary import (
    EVEN,
    Contest,
    Crossing,
    Distribution,
    Load,
    PointSummary,
    RunSummary,
)


@dataclass(frozen=True, slots=True)
class _Metric:
    name: str
    unit: str
    value: Callable[[PointSummary], float]
    more_is_better: bool = False


_METRICS = (
    _Metric("ITL P99", "ms", lambda point: point.itl.percentile(99)),
    _Metric("TTFT P50", "ms", lambda point: point.ttft.percentile(50)),
    _Metric("TTFT P99", "ms", lambda point: point.ttft.percentile(99)),
    _Metric("E2EL P50", "ms", lambda point: point.e2el.percentile(50)),
    _Metric("throughput", "req/s", lambda point: point.requests_per_s, more_is_better=True),
    _Metric(
        "goodput",
        "req/s",
        lambda point: point.goodput.requests_per_s if point.goodput else float("nan"),
        more_is_better=True,
    ),
)


def contests(run: RunSummary) -> list[Contest]:
    """Every metric under every load at which two set-ups or more have a figure."""
    found = (
        _contest(run, metric, load, concurrency)
        for load in run.loads()
        for metric in _METRICS
        for concurrency in run.concurrencies(load)
    )
    return [one for one in found if len(one.ranking) > 1]


def crossings(run: RunSummary) -> list[Crossing]:
    """Where the ITL of the set-up with the best P99 crosses others', at the highest concurrency."""
    last = {one.load: one for one in contests(run) if one.metric == _METRICS[0].name}
    return [found for contest in last.values() for found in _crossings(run, contest)]


def crossing_percent(one: Distribution, other: Distribution) -> tuple[float, bool] | None:
    """The last percentile from P50 on at which two distributions cross.

    Looks only at percentiles that both samples resolve, a tenth apart, and takes figures that are
    even for no crossing.

    Returns:
        The percentile and whether ``one`` is the lower one beyond it; None where they do not cross.
    """
    fewest = min(len(one), len(other))
    if fewest < 2:
        return None
    percents = np.arange(50.0, 100.0 - 100.0 / fewest + 1e-9, 0.1)
    first, second = (np.percentile(side.values_ms, percents) for side in (one, other))
    even = np.abs(first - second) <= EVEN * np.minimum(first, second)
    lead = np.where(even, 0, np.sign(second - first))
    decided = np.flatnonzero(lead)
    changes = np.flatnonzero(np.diff(lead[decided]))
    if not len(changes):
        return None
    at = decided[changes[-1] + 1]
    return float(percents[at]), bool(lead[at] > 0)


def _contest(run: RunSummary, metric: _Metric, load: Load, concurrency: int) -> Contest:
    points = ((one.setup.name, one.at(load, concurrency)) for one in run.serving)
    figures = [(name, metric.value(point)) for name, point in points if point is not None]
    figures = [(name, value) for name, value in figures if not np.isnan(value)]
    sign = -1 if metric.more_is_better else 1
    ranking = sorted(figures, key=lambda figure: (sign * figure[1], figure[0]))
    return Contest(metric.name, metric.unit, load, concurrency, ranking)


def _crossings(run: RunSummary, contest: Contest) -> Iterator[Crossing]:
    gaps = {}
    for one in run.serving:
        point = one.at(contest.load, contest.concurrency)
        if point is not None:
            gaps[one.setup.name] = point.itl
    best, *others = (name for name, _ in contest.ranking)
    for name in others:
        found = crossing_percent(gaps[best], gaps[name])
        if found is not None:
            percent, best_leads = found
            below, above = (name, best) if best_leads else (best, name)
            yield Crossing(contest.load, contest.concurrency, percent, below, above)
