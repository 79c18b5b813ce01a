"""Aggregated engines against prefill and decode apart, on the same number of devices.

The articles' load: 8k and 1k tokens in, 1k out, 1 to 32 requests in flight. Where records hold no
aggregated set-up, one on as many devices is simulated beside them, and marked so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from kvxfer.pd.analysis.compare import contests, crossings
from kvxfer.pd.experiment_result import ExperimentResult, Figure, How, Said, Source, Table
from kvxfer.pd.experiments.base import Experiment
from kvxfer.pd.experiments.context import Context
from kvxfer.pd.experiments.options import Options
from kvxfer.pd.experiments.panels import (
    ITL,
    ITL_P99,
    TTFT,
    TTFT_P50,
    TTFT_P99,
    HowOf,
    Metric,
    against_concurrency,
    cdf_by_concurrency,
    cdf_by_setup,
    holds_from,
    point_table,
)
from kvxfer.pd.experiments.runs import environment_of, findings_of
from kvxfer.pd.experiments.simulation import models_of, simulated_replicas
from kvxfer.pd.experiments.slo_table import slo_findings, slo_table
from kvxfer.pd.load.plan import LoadPlan
from kvxfer.pd.planner.same_model import Model, relation
from kvxfer.pd.summary import EVEN, Load, RunSummary, SetupSummary
from kvxfer.units import format_number

_COMPARED: Final = (ITL_P99, TTFT_P50, TTFT_P99)
_STAND_IN: Final = "agg-simulated"


def _conduct(context: Context) -> ExperimentResult:
    run = context.run()
    stand_in, left_out = _stand_in(run, context) if context.records else (None, ())
    if stand_in is not None:
        run = replace(run, setups=[*run.setups, stand_in])
        run = replace(run, contests=contests(run), crossings=crossings(run))

    def how(one: SetupSummary) -> How:
        return "simulated" if one is stand_in else context.how

    return ExperimentResult(
        name=EXPERIMENT.name,
        question=EXPERIMENT.question,
        scale=context.size,
        environment=environment_of(run),
        sources=[Source(one.setup.name, how(one)) for one in run.serving],
        findings=[said for load in run.loads() for said in _findings(run, load, how)],
        tables=[table for load in run.loads() for table in _tables(run, load, how)],
        figures=[figure for load in run.loads() for figure in _figures(run, load, how)],
        notes=[*findings_of(run, serious=False), *left_out],
        faults=findings_of(run, serious=True),
    )


def _stand_in(run: RunSummary, context: Context) -> tuple[SetupSummary | None, tuple[str, ...]]:
    """An aggregated set-up for records that have none, where an engine's figures are named.

    Figures of another model are no stand-in; what is said of them is the second item.
    """
    has_aggregated = any(one.setup.kind == "aggregated" for one in run.serving)
    pairs = [one for one in run.serving if one.setup.kind == "pd"]
    if has_aggregated or not pairs or not context.options.engine:
        return None, ()
    setup = pairs[0].setup
    models = models_of(context.options)
    steps, measured = Model.named(models.engine.model), Model.named(setup.model)
    found = relation(steps, measured)
    about = f"the engine's figures are of {steps.name}, the records of {measured.name}"
    if found == "other":
        return None, (f"{about}: no aggregated set-up is simulated; name others, --engine-figures",)
    replicas = simulated_replicas(
        _STAND_IN, setup.num_devices, run, models, context.options.objectives
    )
    return replicas, (about,) if found == "unknown" else ()


def _findings(run: RunSummary, load: Load, how: HowOf) -> Iterator[Said]:
    pairs = [
        (aggregated, pd)
        for aggregated in run.serving
        for pd in run.serving
        if (aggregated.setup.kind, pd.setup.kind) == ("aggregated", "pd")
    ]
    if not pairs:
        yield Said(f"{load}: no aggregated and PD set-ups to compare", "computed")
    for aggregated, pd in pairs:
        either = _how_of(how, (aggregated, pd))
        unequal = aggregated.setup.num_devices != pd.setup.num_devices
        if unequal:
            yield Said(
                f"{pd.setup.name} has {pd.setup.num_devices} devices and {aggregated.setup.name} "
                f"{aggregated.setup.num_devices}: not the same cost",
                either,
            )
        for metric in _COMPARED:
            text = winning_from(run, load, metric, aggregated, pd)
            if text:
                devices = f", {_devices(pd)} against {_devices(aggregated)}" if unequal else ""
                yield Said(f"{load}: {text}{devices}", either)
    yield from slo_findings(run, load, _how_of(how, run.serving))
    for one in run.crossings:
        if one.load == load:
            crossing = [each for each in run.serving if each.setup.name in (one.below, one.above)]
            yield Said(
                f"{load}, {one.concurrency} in flight: the ITL of {one.below} is lower up to "
                f"P{one.percent:.1f}, that of {one.above} beyond",
                _how_of(how, crossing),
            )


def _how_of(how: HowOf, setups: Sequence[SetupSummary]) -> How:
    """Of what compares set-ups: simulated where one of them is."""
    hows = {how(one) for one in setups}
    return "simulated" if "simulated" in hows else hows.pop()


def _devices(one: SetupSummary) -> str:
    count = one.setup.num_devices
    return f"{count} device{'' if count == 1 else 's'}"


def winning_from(
    run: RunSummary, load: Load, metric: Metric, aggregated: SetupSummary, pd: SetupSummary
) -> str:
    """From how many requests in flight ``pd`` has the lower figure, and keeps it; in words.

    Figures that are even (`EVEN`) are no win. Empty where no concurrency was measured for both.
    """
    both = [
        (concurrency, metric.value(first), metric.value(second))
        for concurrency in run.concurrencies(load)
        if (first := aggregated.at(load, concurrency)) is not None
        and (second := pd.at(load, concurrency)) is not None
    ]
    if not both:
        return ""
    wins = [ours < theirs * (1.0 - EVEN) for _, theirs, ours in both]
    first_kept = holds_from(wins)
    most, theirs, ours = both[-1]
    figures = (
        f"at {most}: {format_number(ours)} against {format_number(theirs)} {metric.unit} of "
        f"{aggregated.setup.name}"
    )
    if first_kept == len(wins):
        return f"{metric.name} of {pd.setup.name} is not lower at the highest load ({figures})"
    start = both[first_kept][0]
    return f"{metric.name} of {pd.setup.name} is lower from {start} in flight on ({figures})"


def _tables(run: RunSummary, load: Load, how: HowOf) -> Iterator[Table]:
    yield point_table(run, load, f"Figures, {load}", how)
    hows = {how(one) for one in run.serving}
    kept = slo_table(run, load, hows.pop() if len(hows) == 1 else None)
    if kept is not None:
        yield kept


def _figures(run: RunSummary, load: Load, how: HowOf) -> Iterator[Figure]:
    stem = f"i{load.isl}-o{load.osl}"
    most = run.concurrencies(load)[-1]
    panels = [
        curves
        for metric in (ITL_P99, TTFT_P50)
        if (curves := against_concurrency(run, load, metric, how)) is not None
    ]
    made = [
        Figure(
            name=f"{stem}-load",
            caption=f"Tail of gaps and TTFT against load, {load}",
            panels=list(panels),
        )
        if panels
        else None,
        cdf_by_setup(
            run,
            load,
            most,
            name=f"{stem}-setups",
            caption=f"Set-ups at {most} requests in flight, {load}",
            how=how,
        ),
    ]
    for kind in (ITL, TTFT):
        caption = f"{kind.name} by requests in flight, {load}"
        name = f"{stem}-{kind.name.lower()}"
        made.append(cdf_by_concurrency(run, load, kind, name=name, caption=caption, how=how))
    yield from (figure for figure in made if figure is not None)


EXPERIMENT: Final = Experiment(
    name="agg-vs-pd",
    question="On equal numbers of devices, from how many requests in flight do prefill and decode "
    "apart pay, and which limits does each keep?",
    sizes={
        "quick": Options(
            setups=("agg=aggregated", "pd=pd"),
            load=LoadPlan(isl=(256,), osl=(16,), concurrency=(1, 4), prompts_per_concurrency=2),
        ),
        "cpu": Options(
            setups=("agg=aggregated", "pd=pd"),
            load=LoadPlan(
                isl=(256, 2048), osl=(64,), concurrency=(1, 2, 4, 8), prompts_per_concurrency=4
            ),
        ),
        "gpu": Options(
            model="dummy:gpt-oss-120b",
            setups=("agg=aggregated,tp=2", "pd=pd"),
            engine="gpt-oss-120b-h200",
        ),
    },
    conduct=_conduct,
    shares_setups=True,
)
