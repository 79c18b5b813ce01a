"""TTFT against how much of a prompt's KV is there already, served from an existing store.

The slides' sweep: prompts of 8k tokens, of which 0 to 8k are in Mooncake Store, and their open
question: why loading is a quarter of TTFT where all is there. Set-ups are one engine each:
``reuse=none`` computes everything, ``vllm`` has its own prefix cache, ``mooncake``, ``lmcache`` and
``lmcache-far`` a store beside the engine (`kvxfer.pd.launch.stores`), started and ended with it; in
the last one KV lies in another server, from which the one beside the engine reads it by kvxfer.

    cases     the prompts: each begins in its own way, equal for all set-ups
    measure   one at a time: put the beginning there, drop the engine's own cache, ask, count hits
    parts     where a TTFT goes, from what `kvxfer.connectors.vllm.timed` noted in the engine
    record    what a set-up answered
    points    which figures may be shown: hits as asked for and from where, answers as without reuse
    shown     findings, table, drawings

The planner's store has a bandwidth and no hooks: it could say nothing of the parts, so nothing is
simulated.
"""

from datetime import datetime, timezone
from pathlib import Path
from typing import Final

import msgspec

from kvxfer.errors import InvalidUsage, KvxferError
from kvxfer.pd.experiment_result import ExperimentResult, Source
from kvxfer.pd.experiments.base import Experiment
from kvxfer.pd.experiments.context import RUN_FOLDER, Context
from kvxfer.pd.experiments.kv_reuse.cases import Sweep, sweep_of
from kvxfer.pd.experiments.kv_reuse.measure import Asker
from kvxfer.pd.experiments.kv_reuse.points import points_of
from kvxfer.pd.experiments.kv_reuse.record import (
    REUSE_FILE,
    ReuseRun,
    load_run,
    load_runs,
    save_run,
)
from kvxfer.pd.experiments.kv_reuse.shown import figures_of, findings_of, table_of
from kvxfer.pd.experiments.options import Options
from kvxfer.pd.experiments.runs import facts
from kvxfer.pd.launch.spec import SetupSpec
from kvxfer.pd.load.plan import LoadPlan
from kvxfer.pd.load.run import record_of, require_same
from kvxfer.pd.result import PDPoint, require_folder

_NONE: Final = "none=aggregated,reuse=none"
_MOONCAKE: Final = "mooncake=aggregated,reuse=mooncake"
_LMCACHE: Final = ("lmcache=aggregated,reuse=lmcache", "far=aggregated,reuse=lmcache-far")
_ALL: Final = (_NONE, "vllm=aggregated", _MOONCAKE, *_LMCACHE)


def _conduct(context: Context) -> ExperimentResult:
    if context.simulate_only:
        raise InvalidUsage(
            "where the time of a real store goes has to be measured; leave --simulate out"
        )
    runs = _recorded(context.records) if context.records else _measured(context)
    points, faults, notes = points_of(runs, context.how)
    return ExperimentResult(
        name=EXPERIMENT.name,
        question=EXPERIMENT.question,
        scale=context.size,
        environment=facts([run.setup for run in runs]),
        sources=[Source(run.setup.name, context.how) for run in runs],
        findings=list(findings_of(points)),
        tables=[table_of(points)],
        figures=list(figures_of(points)),
        notes=[
            "loading is lookup, placement, transfer and waiting; set-ups without a store have no "
            "parts",
            *notes,
        ],
        faults=faults,
    )


def _recorded(folders: tuple[Path, ...]) -> list[ReuseRun]:
    runs = [run for folder in folders for run in load_runs(folder)]
    if not runs:
        raise InvalidUsage(
            f"no {REUSE_FILE} in folders of {', '.join(map(str, folders))}; give the run folder of "
            "an earlier kv-reuse"
        )
    return sorted(runs, key=lambda run: run.setup.started_at)


def _measured(context: Context) -> list[ReuseRun]:
    """What the folder lacks, measured; and all that it holds of these set-ups."""
    sweep, specs = sweep_of(context.options), context.options.specs()
    for spec in specs:
        if spec.url is not None or spec.kind != "aggregated":
            raise InvalidUsage(f"{spec.name}: kv-reuse starts aggregated engines of its own")
    if len({spec.name for spec in specs}) != len(specs):
        raise InvalidUsage("each set-up needs a name of its own")
    runs = []
    for spec in specs:
        try:
            runs.append(_run(context, spec, sweep))
        except KvxferError as error:
            context.failed(spec, error)
    if not runs:
        raise InvalidUsage(f"nothing could be measured; {context.failures[0]}")
    return runs


def _run(context: Context, spec: SetupSpec, sweep: Sweep) -> ReuseRun:
    folder = context.out / RUN_FOLDER / spec.name
    launcher = context.launcher
    setup = record_of(spec, launcher)
    if (folder / REUSE_FILE).is_file():
        held = load_run(folder)
        require_same(folder, held.setup, setup)
        if _answers(held, sweep):
            return held
    require_folder(folder)
    with launcher.start(spec, context.watchers.starting(spec)) as stack:
        num_prompts = sweep.count * len(sweep.hits)
        point = PDPoint(concurrency=1, num_prompts=num_prompts, isl=sweep.isl, osl=sweep.osl)
        context.watchers.began(spec, point)
        devices = [name for engine in stack.engines for name in engine.devices]
        setup = msgspec.structs.replace(
            setup,
            devices=devices,
            token_budget=stack.token_budget(),
            started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        run = Asker(stack=stack, setup=setup, timeout_s=context.point_timeout_s).run(sweep)
    save_run(folder, run)
    return run


def _answers(run: ReuseRun, sweep: Sweep) -> bool:
    """Whether a record holds all of a sweep and nothing else."""
    keys = {(one.hit_tokens, one.index) for one in run.asked}
    return (run.isl, run.osl, keys) == (sweep.isl, sweep.osl, sweep.keys)


EXPERIMENT: Final = Experiment(
    name="kv-reuse",
    question="How much sooner does the first token come where a store has the KV of a prompt's "
    "beginning, and where does the time to load it go?",
    sizes={
        "quick": Options(
            setups=(_NONE, _MOONCAKE),
            load=LoadPlan(isl=(1024,), osl=(8,), concurrency=(1,), prompts_per_concurrency=3),
            hits=(0, 512, 1024),
            prefill_args=("--enforce-eager",),
        ),
        "cpu": Options(
            setups=_ALL,
            load=LoadPlan(isl=(4096,), osl=(8,), concurrency=(1,), prompts_per_concurrency=8),
            hits=(0, 512, 1024, 2048, 4096),
        ),
        "gpu": Options(
            model="dummy:llama-3.1-8b",
            setups=_ALL,
            load=LoadPlan(isl=(8192,), osl=(8,), concurrency=(1,), prompts_per_concurrency=10),
            hits=(0, 1024, 2048, 4096, 8192),
        ),
    },
    conduct=_conduct,
)
