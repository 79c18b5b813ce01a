"""More GPUs: larger engines, more engines, and how they are shared out between prefill and decode.

The articles found that more GPUs help TTFT and make gaps a little longer, since ranks wait for each
other; public rows say the opposite of gaps. So both are asked here, for each way to grow.
"""

from collections.abc import Iterator
from typing import Final

from kvxfer.pd.experiment_result import (
    MAX_SERIES,
    Axis,
    Curve,
    Curves,
    ExperimentResult,
    Figure,
    How,
    Panel,
    Said,
    Source,
)
from kvxfer.pd.experiments.base import Experiment
from kvxfer.pd.experiments.context import Context
from kvxfer.pd.experiments.options import Options
from kvxfer.pd.experiments.panels import (
    ITL_P50,
    ITL_P99,
    TTFT_P50,
    TTFT_P99,
    Metric,
    point_table,
)
from kvxfer.pd.experiments.runs import environment_of, findings_of
from kvxfer.pd.launch.spec import parse_setup
from kvxfer.pd.load.plan import LoadPlan
from kvxfer.pd.result import PDSetup
from kvxfer.pd.summary import EVEN, Load, PointSummary, RunSummary
from kvxfer.units import format_number

_ASKED: Final = (TTFT_P50, TTFT_P99, ITL_P50, ITL_P99)
_SIMULATED: Final = (
    *(f"agg-tp{tp}=aggregated,tp={tp}" for tp in (1, 2, 4, 8)),
    *(f"pd-tp{tp}=pd,prefill-tp={tp},decode-tp={tp}" for tp in (1, 2, 4)),
    *(f"pd-{p}p{4 - p}d=pd,prefill={p},decode={4 - p}" for p in (1, 2, 3)),
)
"""What is simulated where no set-up is named: up to eight GPUs, and every ratio of four."""
_Grown = list[tuple[int, str, PointSummary]]


def way_of(setup: PDSetup) -> str:
    """How a set-up's GPUs are shared out; set-ups of one way differ in parallel sizes alone."""
    if setup.kind == "pd":
        return f"pd {setup.num_prefill}:{setup.num_decode}"
    return "aggregated"


def ways(run: RunSummary, load: Load, concurrency: int) -> dict[str, _Grown]:
    """By way the (GPUs, name, figures) of its set-ups, ascending."""
    found: dict[str, _Grown] = {}
    for one in run.serving:
        point = one.at(load, concurrency)
        if point is not None and one.setup.kind in ("pd", "aggregated"):
            found.setdefault(way_of(one.setup), []).append(
                (one.setup.num_devices, one.setup.name, point)
            )
    for grown in found.values():
        grown.sort(key=lambda entry: entry[:2])
    return found


def _conduct(context: Context) -> ExperimentResult:
    run = _run(context)
    how = context.how
    return ExperimentResult(
        name=EXPERIMENT.name,
        question=EXPERIMENT.question,
        scale=context.size,
        environment=environment_of(run),
        sources=[Source(one.setup.name, how) for one in run.serving],
        findings=[said for load in run.loads() for said in _findings(run, load, how)],
        tables=[
            point_table(run, load, f"Figures, {load}", lambda one: how) for load in run.loads()
        ],
        figures=[_figure(run, load, how) for load in run.loads()],
        notes=findings_of(run, serious=False),
        faults=findings_of(run, serious=True),
    )


def _run(context: Context) -> RunSummary:
    options = context.options
    is_default = options.setups == EXPERIMENT.sizes[context.size].setups
    if context.simulate_only and is_default:
        return context.simulate([parse_setup(text) for text in _SIMULATED], options.load)
    return context.run()


def _findings(run: RunSummary, load: Load, how: How) -> Iterator[Said]:
    most = run.concurrencies(load)[-1]
    found = ways(run, load, most)
    where = f"{load}, {most} in flight"
    for way, grown in found.items():
        (few, _, small), (many, _, large) = grown[0], grown[-1]
        if few == many:
            continue
        texts = (_change(metric, metric.value(small), metric.value(large)) for metric in _ASKED)
        yield Said(f"{where}, {way}, from {few} to {many} GPUs: {', '.join(texts)}", how)
    by_count: dict[int, _Grown] = {}
    for grown in found.values():
        for entry in grown:
            by_count.setdefault(entry[0], []).append(entry)
    for count, entries in sorted(by_count.items()):
        if len(entries) > 1:
            yield Said(f"{where}, {count} GPUs: {_best_of(entries)}", how)


def _change(metric: Metric, before: float, after: float) -> str:
    if abs(after - before) <= EVEN * before:
        return f"{metric.name} stays at {format_number(before)} ms"
    return f"{metric.name} {format_number(before)} to {format_number(after)} ms"


def _best_of(entries: _Grown) -> str:
    texts = []
    for metric in _ASKED:
        _, name, point = min(entries, key=lambda entry: metric.value(entry[2]))
        texts.append(
            f"{metric.name} is least with {name} ({format_number(metric.value(point))} ms)"
        )
    return ", ".join(texts)


def _figure(run: RunSummary, load: Load, how: How) -> Figure:
    """A line a way to grow, over the number of GPUs, at the highest concurrency."""
    most = run.concurrencies(load)[-1]
    found = list(ways(run, load, most).items())[:MAX_SERIES]
    counts = sorted({float(entry[0]) for _, grown in found for entry in grown})
    panels: list[Panel] = [
        Curves(
            title=metric.name,
            x=Axis("GPUs", "log", counts),
            y=Axis(f"{metric.name}, {metric.unit}", "log"),
            series=[
                Curve(
                    way,
                    [float(entry[0]) for entry in grown],
                    [metric.value(entry[2]) for entry in grown],
                    how,
                )
                for way, grown in found
            ],
        )
        for metric in _ASKED
    ]
    caption = f"TTFT and gaps by number of GPUs, {load}, {most} in flight"
    return Figure(name=f"i{load.isl}-o{load.osl}-gpus", caption=caption, panels=panels, key=True)


EXPERIMENT: Final = Experiment(
    name="gpu-count",
    question="What do more GPUs bring, in larger engines, in more engines, and by the ratio of "
    "prefill to decode?",
    sizes={
        "quick": Options(
            setups=("agg=aggregated", "pd=pd"),
            load=LoadPlan(isl=(256,), osl=(16,), concurrency=(4,), prompts_per_concurrency=2),
        ),
        "cpu": Options(
            setups=("agg=aggregated", "pd=pd", "pd-2p1d=pd,prefill=2"),
            load=LoadPlan(isl=(1024,), osl=(64,), concurrency=(1, 4, 8), prompts_per_concurrency=4),
        ),
        "gpu": Options(
            model="dummy:gpt-oss-120b",
            setups=("agg-tp1=aggregated", "agg-tp2=aggregated,tp=2", "pd-tp1=pd"),
            load=LoadPlan(isl=(1024, 8192), concurrency=(1, 8, 32)),
            engine="gpt-oss-120b-h200",
        ),
    },
    conduct=_conduct,
    shares_setups=True,
)
