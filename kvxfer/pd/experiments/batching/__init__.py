"""How batching decides who a long prompt holds up: short prompts, and requests that stream.

The same trace both ways: served by vLLM with its own switches where it has them, and simulated for
every technique. vLLM 0.32.0 has no static or dynamic batching, and no limit on long prompts that
prefill at once; its priorities go by a field of each request that its load generator does not
send: these are simulated alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvxfer.errors import InvalidUsage
from kvxfer.pd.analysis.replies import Reply, replies_of
from kvxfer.pd.experiment_result import ExperimentResult, Source
from kvxfer.pd.experiments.base import Experiment
from kvxfer.pd.experiments.batching.blocking import Blocking, Held, held_up
from kvxfer.pd.experiments.batching.shown import Row, figures_of, findings_of_rows, table_of
from kvxfer.pd.experiments.batching.ways import Way, measured_ways, ways_of
from kvxfer.pd.experiments.context import RUN_FOLDER, Context
from kvxfer.pd.experiments.options import Options
from kvxfer.pd.experiments.runs import environment_of, findings_of
from kvxfer.pd.experiments.simulation import models_of
from kvxfer.pd.load.plan import LoadPlan
from kvxfer.pd.load.replay import Replay, read_replay
from kvxfer.pd.planner import simulate
from kvxfer.pd.result import bench_path, find_points, find_setups, load_point, load_setup
from kvxfer.pd.vllm_json import load_bench

_NUM_PERIODS: Final = 5


def load_of(options: Options) -> Blocking:
    """The load that an experiment's options describe: the shortest and the longest of ``isl``.

    Raises:
        InvalidUsage: they do not describe one.
    """
    load = options.load
    rate = min(load.request_rates)
    if rate == float("inf"):
        raise InvalidUsage("short requests come at a finite rate; give --request-rate")
    return Blocking(
        short=min(load.isl),
        long=max(load.isl),
        osl=max(load.osl),
        requests_per_s=rate,
        period_s=load.duration_s / _NUM_PERIODS,
        num_periods=_NUM_PERIODS,
    )


def _conduct(context: Context) -> ExperimentResult:
    if context.records:
        raise InvalidUsage(
            "runs of kvxfer pd bench have no long prompts among short ones; leave --records out "
            "(what this experiment has measured in --out is used)"
        )
    load = load_of(context.options)
    ways = ways_of(load)
    replay = read_replay(load.write(context.out / "blocking.jsonl"))
    measured: list[Row] = []
    environment: dict[str, str] = {}
    notes: list[str] = []
    faults: list[str] = []
    if not context.simulate_only:
        plan: LoadPlan = replace(
            context.options.load,
            replay=replay,
            concurrency=(max(context.options.load.concurrency),),
        )
        wanted = measured_ways(ways, context.options)
        run = context.measure([way.spec for way in wanted if way.spec is not None], plan)
        measured = list(recorded(context.out / RUN_FOLDER, wanted, replay, load))
        environment = environment_of(run)
        notes, faults = findings_of(run, serious=False), findings_of(run, serious=True)
    simulated, remarks = _simulated(ways, replay, load, context.options)
    rows = [*measured, *simulated]
    return ExperimentResult(
        name=EXPERIMENT.name,
        question=EXPERIMENT.question,
        scale=context.size,
        environment={**environment, "simulated engine": context.options.engine},
        sources=[Source(f"{one.way.name}: {one.way.what}", one.how) for one in rows],
        findings=list(findings_of_rows(rows)),
        tables=[table_of(rows)],
        figures=list(figures_of(rows)),
        notes=[
            f"{load.num_periods} prompts of {load.long} tokens, one every {load.period_s:g} s, "
            f"among prompts of {load.short} at {load.requests_per_s:g} a second; {load.osl} out",
            "held up: while a long prompt is served, from its sending to its first token",
            "compare measured with measured and simulated with simulated rows: the simulated "
            "engine is not the one that was measured, unless --engine-figures is of it",
            *notes,
            *remarks,
        ],
        faults=faults,
    )


def recorded(folder: Path, ways: Sequence[Way], replay: Replay, load: Blocking) -> Iterator[Row]:
    """What a run's folder holds of these ways under this load.

    Raises:
        InvalidUsage: a record cannot be read.
    """
    by_name = {way.spec.name: way for way in ways if way.spec is not None}
    for path in find_setups(folder):
        setup = load_setup(path)
        way = by_name.get(setup.name)
        for file in find_points(path)[0]:
            result = load_bench(bench_path(path, load_point(file)))
            if way is None or result.num_requests != len(replay.trace.requests):
                continue  # of a load that this folder was used for before
            starts_s = result.start_times or [one.arrival_s for one in replay.trace.requests]
            yield Row(
                way,
                "measured",
                setup.num_devices,
                _held(replies_of(result).completed, starts_s, replay, load),
            )


def _simulated(
    ways: Sequence[Way], replay: Replay, load: Blocking, options: Options
) -> tuple[list[Row], list[str]]:
    """Rows, and what they leave out."""
    models = models_of(options)
    rows: list[Row] = []
    remarks: dict[str, None] = {}
    # Prompts share nothing: hashes would only cost time.
    requests = tuple(replace(one, prefix_hashes=()) for one in replay.trace.requests)
    trace = replace(replay.trace, requests=requests)
    for way in ways:
        if way.setup is None:
            continue
        run = simulate(way.setup, trace, models.engine, models.kv, models.transfer)
        remarks.update(dict.fromkeys(f"{way.name}, extrapolated: {it}" for it in run.extrapolated))
        held = _held(run.replies().completed, run.sent_s.tolist(), replay, load)
        rows.append(Row(way, "simulated", way.setup.num_gpus, held))
    return rows, list(remarks)


def _held(
    replies: Sequence[Reply], starts_s: Sequence[float], replay: Replay, load: Blocking
) -> Held:
    return held_up(replies, dict(enumerate(starts_s)), replay.trace, load.threshold)


EXPERIMENT: Final = Experiment(
    name="batching",
    question="Who is held up while one long prompt is served, and what do ways of batching change?",
    sizes={
        "quick": Options(
            load=LoadPlan(
                isl=(64, 1024), osl=(16,), concurrency=(64,), request_rates=(4.0,), duration_s=10.0
            ),
            engine="llama-3.1-8b-h200",
        ),
        "cpu": Options(
            load=LoadPlan(
                isl=(64, 4096), osl=(64,), concurrency=(64,), request_rates=(4.0,), duration_s=60.0
            ),
            engine="llama-3.1-8b-h200",
        ),
        "gpu": Options(
            model="dummy:llama-3.1-8b",
            load=LoadPlan(
                isl=(256, 8192),
                osl=(128,),
                concurrency=(64,),
                request_rates=(16.0,),
                duration_s=60.0,
            ),
            engine="llama-3.1-8b-h200",
        ),
    },
    conduct=_conduct,
)
