"""Which limit which set-up keeps, and up to how many requests in flight."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvxfer.pd.experiment_result import Column, How, Said, Table
from kvxfer.pd.experiments.panels import ITL_P99, TTFT_P99, Metric
from kvxfer.pd.summary import Load, RunSummary, SetupSummary

_LIMITS: tuple[tuple[Metric, tuple[float, ...]], ...] = (
    (ITL_P99, (10, 20, 30, 50, 100, 200, 500)),
    (TTFT_P99, (200, 500, 1000, 2000, 5000, 10000)),
)


@dataclass(frozen=True, slots=True)
class Kept:
    """A limit in milliseconds and, by set-up, up to how many requests in flight each keeps it.

    0: it is not kept at the lowest load; None: not at the lowest that this set-up was measured at,
    which others were below.
    """

    metric: Metric
    limit_ms: float
    up_to: dict[str, int | None]

    def __str__(self) -> str:
        return f"{self.metric.name} <= {self.limit_ms:g} ms"


def kept_limits(run: RunSummary, load: Load) -> Iterator[Kept]:
    """Every limit that one set-up keeps further than another does."""
    for metric, limits in _LIMITS:
        for limit_ms in limits:
            up_to = {
                one.setup.name: _up_to(run, one, load, metric, limit_ms) for one in run.serving
            }
            if len(set(up_to.values()) - {None}) > 1:
                yield Kept(metric, limit_ms, up_to)


def slo_table(run: RunSummary, load: Load, how: How | None) -> Table | None:
    """A row a limit, a column a set-up: requests in flight up to which it is kept, 0 at none."""
    kept = list(kept_limits(run, load))
    if not kept:
        return None
    names = list(kept[0].up_to)
    return Table(
        title=f"Most requests in flight that keep a limit, {load}",
        how=how,
        columns=[Column("limit"), *(Column(name) for name in names)],
        rows=[[str(one), *map(_cell, one.up_to.values())] for one in kept],
    )


def slo_findings(run: RunSummary, load: Load, how: How) -> Iterator[Said]:
    """For each metric, the tightest limit that tells set-ups apart, in words."""
    said: set[str] = set()
    for one in kept_limits(run, load):
        if one.metric.name not in said:
            said.add(one.metric.name)
            parts = (
                f"{name} up to {count} in flight" if count else f"{name} at none"
                for name, count in one.up_to.items()
                if count is not None
            )
            yield Said(f"{load}: {one} is kept by {', '.join(parts)}", how)


def _up_to(
    run: RunSummary, one: SetupSummary, load: Load, metric: Metric, limit_ms: float
) -> int | None:
    reached = None
    for concurrency in run.concurrencies(load):
        point = one.at(load, concurrency)
        if point is not None:
            if not metric.value(point) <= limit_ms:
                is_lowest = concurrency == run.concurrencies(load)[0]
                return 0 if is_lowest else reached
            reached = concurrency
    return reached


def _cell(count: int | None) -> float | None:
    return None if count is None else float(count)
