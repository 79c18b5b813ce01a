"""Every request of a run, for what percentiles of a whole point do not tell."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvxfer.pd.analysis.replies import Replies, replies_of
from kvxfer.pd.experiments.context import Context
from kvxfer.pd.experiments.runs import unique_name
from kvxfer.pd.experiments.simulation import models_of, setup_of, trace_of
from kvxfer.pd.planner import simulate
from kvxfer.pd.result import bench_path, find_points, find_setups, load_point, load_setup
from kvxfer.pd.summary import Load
from kvxfer.pd.vllm_json import load_bench


@dataclass(frozen=True, slots=True)
class Served:
    """One set-up under one load, request by request; ``duration_s`` is of the whole point."""

    setup: str
    load: Load
    concurrency: int
    replies: Replies
    duration_s: float

    @property
    def mean_in_flight(self) -> float:
        """Requests at once, over the whole point; at a finite rate fewer than ``concurrency``."""
        return sum(one.e2el_ms for one in self.replies.completed) * 1e-3 / self.duration_s

    def __str__(self) -> str:
        most = "" if self.load.request_rate is None else "at most "
        return f"{self.setup}, {self.load}, {most}{self.concurrency} in flight"


def served_points(context: Context) -> list[Served]:
    """Every point that `Context.run` analyses, but of engines that only prefill.

    Call it after `Context.run`, which measures what is missing.

    Raises:
        InvalidUsage: a record cannot be read.
    """
    return list(_simulated(context) if context.simulate_only else _recorded(context))


def heaviest(points: list[Served]) -> list[Served]:
    """Of each set-up the one with the most prompt tokens in flight, on the average."""
    chosen: dict[str, Served] = {}
    for one in points:
        best = chosen.get(one.setup)
        if best is None or _weight(one) > _weight(best):
            chosen[one.setup] = one
    return list(chosen.values())


def _weight(one: Served) -> float:
    return one.mean_in_flight * one.load.isl


def _recorded(context: Context) -> Iterator[Served]:
    found = [(run, path) for run in context.folders() for path in find_setups(run)]
    names = [load_setup(path).name for _, path in found]
    for (run, path), name in zip(found, names, strict=True):
        if load_setup(path).kind == "prefill_only":
            continue
        for file in find_points(path)[0]:
            point = load_point(file)
            result = load_bench(bench_path(path, point))
            yield Served(
                unique_name(name, run, names),
                Load.of(point),
                point.concurrency,
                replies_of(result),
                result.duration,
            )


def _simulated(context: Context) -> Iterator[Served]:
    options = context.options
    models = models_of(options)
    for spec in options.specs():
        for point in options.load.points(spec):
            trace = trace_of(point, options.load)
            run = simulate(setup_of(spec), trace, models.engine, models.kv, models.transfer)
            yield Served(
                spec.name, Load.of(point), point.concurrency, run.replies(), run.duration_s
            )
