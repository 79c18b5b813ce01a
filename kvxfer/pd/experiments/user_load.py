"""Loads like those of users: finite rates, bursts, and a trace of mixed lengths.

A closed loop keeps engines full; users do not. At a low rate two engines for prefill and decode are
cost alone; goodput against rate shows from which rate on they pay.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from kvxfer.errors import InvalidUsage
from kvxfer.pd.experiment_result import (
    MAX_SERIES,
    Axis,
    Cell,
    Column,
    Curve,
    Curves,
    ExperimentResult,
    Figure,
    How,
    Panel,
    Said,
    Source,
    Table,
)
from kvxfer.pd.experiments.base import Experiment
from kvxfer.pd.experiments.context import Context
from kvxfer.pd.experiments.mixed_trace import write_mixed_trace
from kvxfer.pd.experiments.options import Options
from kvxfer.pd.experiments.panels import (
    ITL_P99,
    METRICS,
    TTFT_P50,
    TTFT_P99,
    Metric,
    holds_from,
    number,
)
from kvxfer.pd.experiments.runs import environment_of, findings_of
from kvxfer.pd.load.plan import LoadPlan
from kvxfer.pd.load.replay import read_replay
from kvxfer.pd.summary import EVEN, Load, PointSummary, RunSummary
from kvxfer.units import format_number

# Of the requests: a set-up that has fewer good ones does not keep the objectives.
_KEPT: Final = 0.9
_SEED: Final = 7
_TRACE_FOLDER: Final = "trace"
_GOODPUT: Final = Metric(
    "goodput",
    "requests/s",
    lambda point: point.goodput.requests_per_s if point.goodput else float("nan"),
)


@dataclass(frozen=True, slots=True)
class Family:
    """Points that differ in their rate alone."""

    isl: int
    osl: int
    burstiness: float

    def __str__(self) -> str:
        return str(Load(self.isl, self.osl, burstiness=self.burstiness))

    def lines(self, run: RunSummary) -> dict[str, list[tuple[float, PointSummary]]]:
        """By set-up its points and their rates, ascending."""
        found: dict[str, list[tuple[float, PointSummary]]] = {}
        for one in run.serving:
            pairs = [
                (point.load.request_rate, point)
                for point in one.points
                if point.load.request_rate is not None
                and not point.load.trace
                and Family.of(point.load) == self
            ]
            if pairs:
                found[one.setup.name] = sorted(pairs, key=lambda pair: pair[0])
        return found

    @classmethod
    def of(cls, load: Load) -> "Family":
        """That of a load."""
        return cls(load.isl, load.osl, load.burstiness)


def families(run: RunSummary) -> list[Family]:
    """Of all points at finite rates, Poisson arrivals first.

    Raises:
        InvalidUsage: there is no such point.
    """
    found = {
        Family.of(load) for load in run.loads() if load.request_rate is not None and not load.trace
    }
    if not found:
        raise InvalidUsage("no point at a finite rate; measure some with --request-rate 1,2,4")
    return sorted(found, key=lambda one: (-one.isl, -one.osl, -one.burstiness))


def _conduct(context: Context) -> ExperimentResult:
    if not context.options.slo:
        raise InvalidUsage("goodput needs objectives; give --slo ttft:MS,itl:p99:MS")
    run = context.run()
    groups = families(run)
    how = context.how
    replayed = None if context.records else _replayed(context)
    runs = [run] if replayed is None else [run, replayed]
    tables = [_rate_table(run, group, how) for group in groups]
    if replayed is not None:
        tables.append(_trace_table(replayed, how))
    return ExperimentResult(
        name=EXPERIMENT.name,
        question=EXPERIMENT.question,
        scale=context.size,
        environment=environment_of(run),
        sources=[Source("points at finite rates", how)]
        + ([Source("trace of mixed lengths, made up", how)] if replayed is not None else []),
        findings=[
            *(said for group in groups for said in _findings(run, group, how)),
            *(_trace_findings(replayed, how) if replayed is not None else ()),
        ],
        tables=tables,
        figures=list(_figures(run, groups, how)),
        notes=[
            f"good: a request with {' and '.join(map(str, context.options.objectives))}",
            *dict.fromkeys(text for one in runs for text in findings_of(one, serious=False)),
        ],
        faults=[text for one in runs for text in findings_of(one, serious=True)],
    )


def _replayed(context: Context) -> RunSummary:
    """The set-ups under a trace of mixed lengths, at the middle one of the rates."""
    load = context.options.load
    rates = sorted(rate for rate in load.request_rates if rate < float("inf"))
    rate = rates[len(rates) // 2]
    path = write_mixed_trace(
        context.out / "mixed.jsonl",
        num_requests=max(10, round(rate * load.duration_s)),
        longest=max(load.isl),
        osl=max(load.osl),
        requests_per_s=rate,
        seed=_SEED,
    )
    replay = replace(load, replay=read_replay(path))
    specs = context.options.specs()
    if context.simulate_only:
        return context.simulate(specs, replay)
    return context.measure(specs, replay, _TRACE_FOLDER)


def _findings(run: RunSummary, group: Family, how: How) -> Iterator[Said]:
    lines = group.lines(run)
    for name, points in lines.items():
        yield Said(f"{group}: {_kept_up_to(name, points)}", how)
    kinds = {one.setup.name: one.setup.kind for one in run.serving}
    for first, theirs in lines.items():
        for second, ours in lines.items():
            if (kinds[first], kinds[second]) == ("aggregated", "pd"):
                yield Said(f"{group}: {pays_from(first, theirs, second, ours)}", how)
                yield from _sparse(group, first, theirs, second, ours, how)


def _kept_up_to(name: str, points: list[tuple[float, PointSummary]]) -> str:
    kept = 0.0
    for rate, point in points:
        if point.goodput is None or point.goodput.attained < _KEPT:
            break
        kept = rate
    if not kept:
        return f"{name} has {_KEPT:.0%} good requests at no rate from {points[0][0]:g}/s on"
    return f"{name} has {_KEPT:.0%} good requests up to {kept:g}/s"


def pays_from(
    first: str,
    theirs: list[tuple[float, PointSummary]],
    second: str,
    ours: list[tuple[float, PointSummary]],
) -> str:
    """From which rate on ``second`` has the higher goodput, and keeps it; in words.

    Figures that are even (`EVEN`) do not pay.
    """
    other = dict(theirs)
    both = [
        (rate, _GOODPUT.value(other[rate]), _GOODPUT.value(point))
        for rate, point in ours
        if rate in other
    ]
    if not both:
        return f"{second} and {first} share no rate"
    pays = [mine > aggregated * (1.0 + EVEN) for _, aggregated, mine in both]
    at = holds_from(pays)
    highest, aggregated, mine = both[-1]
    figures = (
        f"at {highest:g}/s: {format_number(mine)} good requests/s against "
        f"{format_number(aggregated)}"
    )
    if at == len(pays):
        return f"{second} does not pay against {first} at the highest rate ({figures})"
    return f"{second} pays against {first} from {both[at][0]:g} requests/s on ({figures})"


def _sparse(
    group: Family,
    first: str,
    theirs: list[tuple[float, PointSummary]],
    second: str,
    ours: list[tuple[float, PointSummary]],
    how: How,
) -> Iterator[Said]:
    """What prefill and decode apart cost where hardly anything is in flight."""
    (rate, aggregated), (other, pd) = theirs[0], ours[0]
    if rate == other:
        parts = ", ".join(
            f"{metric.name} {format_number(metric.value(pd))} against "
            f"{format_number(metric.value(aggregated))} {metric.unit}"
            for metric in (TTFT_P50, TTFT_P99, ITL_P99)
        )
        yield Said(f"{group}, sparse ({rate:g}/s), {second} against {first}: {parts}", how)


def _trace_findings(run: RunSummary, how: How) -> Iterator[Said]:
    for one in run.serving:
        for point in one.points:
            if point.goodput is not None:
                yield Said(
                    f"trace of mixed lengths, {point.load.request_rate:g}/s: {one.setup.name} has "
                    f"{point.goodput.attained:.0%} good requests, "
                    f"{format_number(point.goodput.requests_per_s)}/s",
                    how,
                )


def _rate_table(run: RunSummary, group: Family, how: How) -> Table:
    rows = [
        [name, rate, *_figures_of(point)]
        for name, points in group.lines(run).items()
        for rate, point in points
    ]
    return Table(
        title=f"By rate, {group}",
        how=how,
        columns=[Column("set-up"), Column("sent", "requests/s"), *_columns()],
        rows=rows,
    )


def _trace_table(run: RunSummary, how: How) -> Table:
    rows = [
        [one.setup.name, str(point.load), *_figures_of(point)]
        for one in run.serving
        for point in one.points
    ]
    return Table(
        title="Trace of mixed lengths (means), prompts that share prefixes",
        how=how,
        columns=[Column("set-up"), Column("load"), *_columns()],
        rows=rows,
    )


def _columns() -> list[Column]:
    return [
        Column("good", "%"),
        Column(_GOODPUT.name, _GOODPUT.unit),
        *(Column(one.name, one.unit) for one in METRICS),
    ]


def _figures_of(point: PointSummary) -> list[Cell]:
    attained = None if point.goodput is None else 100.0 * point.goodput.attained
    figures = (number(metric.value(point)) for metric in METRICS)
    return [attained, number(_GOODPUT.value(point)), *figures]


def _figures(run: RunSummary, groups: list[Family], how: How) -> Iterator[Figure]:
    for metric, name, caption in (
        (_GOODPUT, "goodput", "Goodput against the rate of requests"),
        (ITL_P99, "itl", "Tail of gaps against the rate of requests"),
        (TTFT_P99, "ttft", "Tail of TTFT against the rate of requests"),
    ):
        panels: list[Panel] = [
            panel for group in groups if (panel := _panel(run, group, metric, how)) is not None
        ]
        if panels:
            yield Figure(name=f"rate-{name}", caption=caption, panels=panels, key=True)


def _panel(run: RunSummary, group: Family, metric: Metric, how: How) -> Curves | None:
    lines = group.lines(run)
    series = []
    for name, points in list(lines.items())[:MAX_SERIES]:
        pairs = [(rate, metric.value(point)) for rate, point in points]
        pairs = [(rate, value) for rate, value in pairs if value == value]  # no NaN
        if pairs:
            series.append(Curve(name, [rate for rate, _ in pairs], [y for _, y in pairs], how))
    if not series:
        return None
    rates = sorted({rate for curve in series for rate in curve.x})
    return Curves(
        title=f"{group}",
        x=Axis("requests sent a second", "log", rates),
        y=Axis(f"{metric.name}, {metric.unit}", "linear" if metric is _GOODPUT else "log"),
        series=series,
    )


EXPERIMENT: Final = Experiment(
    name="user-load",
    question="Under loads like those of users, what is the goodput at each rate, and from which "
    "rate on do prefill and decode apart pay?",
    sizes={
        "quick": Options(
            setups=("agg=aggregated", "pd=pd"),
            load=LoadPlan(
                isl=(256,),
                osl=(16,),
                concurrency=(64,),
                request_rates=(1.0, 4.0),
                duration_s=5.0,
            ),
            slo="ttft:2000,itl:p99:200",
        ),
        "cpu": Options(
            setups=("agg=aggregated", "pd=pd"),
            load=LoadPlan(
                isl=(1024,),
                osl=(64,),
                concurrency=(256,),
                request_rates=(0.2, 0.5, 1.0, 2.0, 4.0),
                burstiness=(1.0, 0.25),
                duration_s=30.0,
            ),
            slo="ttft:1000,itl:p99:100",
        ),
        "gpu": Options(
            model="dummy:gpt-oss-120b",
            setups=("agg=aggregated,tp=2", "pd=pd"),
            load=LoadPlan(
                isl=(8192,),
                osl=(1024,),
                concurrency=(512,),
                request_rates=(0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0),
                burstiness=(1.0, 0.25),
                duration_s=120.0,
            ),
            slo="ttft:2000,itl:p99:50",
            engine="gpt-oss-120b-h200",
        ),
    },
    conduct=_conduct,
    shares_setups=True,
)
