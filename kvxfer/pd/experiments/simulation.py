"""The same set-ups and loads, simulated: a run that engines have not served.

What a simulated run stands on is in ``kvxfer/pd/planner/DESIGN.md``; where it goes beyond what was
measured, its set-up has a finding that says so.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from kvxfer.errors import InvalidUsage
from kvxfer.layout.models import load_model
from kvxfer.pd.analysis import Objective
from kvxfer.pd.analysis.compare import contests, crossings
from kvxfer.pd.experiments.options import Options
from kvxfer.pd.launch.spec import SetupSpec
from kvxfer.pd.load.plan import LoadPlan, seed_of
from kvxfer.pd.planner import KVSize, Setup, Trace, load_transfer
from kvxfer.pd.planner.figures import find_engine
from kvxfer.pd.planner.predict import Models, predict
from kvxfer.pd.planner.traces import closed_loop, open_loop
from kvxfer.pd.result import PDPoint, PDSetup
from kvxfer.pd.summary import Finding, Load, PointSummary, RunSummary, SetupSummary

_BUDGET_WORD = "--max-num-batched-tokens"
_BUDGET = 8192
_NUMBER = re.compile("[0-9]+")


def models_of(options: Options) -> Models:
    """The costs: an engine's figures, the KV of its model, transfers of sweeps where there are any.

    Raises:
        InvalidUsage: a name is not known, a record cannot be read, or sweeps have rows of several
            transports, memories and so on, and none is named.
    """
    if not options.engine:
        raise InvalidUsage("nothing to simulate an engine by; name its figures: --engine-figures")
    found = find_engine(options.engine)
    kv = KVSize.of(load_model(found.model), dtype=found.kv_dtype)
    sweeps = options.sweeps
    transfer = load_transfer(sweeps, only=options.sweep_rows) if sweeps else None
    return Models(engine=found, kv=kv, transfer=transfer)


def simulated_run(
    specs: Sequence[SetupSpec],
    load: LoadPlan,
    models: Models,
    objectives: Sequence[Objective] = (),
) -> RunSummary:
    """Every set-up at every point of the load.

    Raises:
        InvalidUsage: a set-up is of a kind that is not simulated, or the engine's figures have not
            its parallel size.
    """
    setups = [_simulated(spec, load, models, tuple(objectives)) for spec in specs]
    run = RunSummary(setups=setups, objectives=[str(one) for one in objectives])
    return replace(run, contests=contests(run), crossings=crossings(run))


def _simulated(
    spec: SetupSpec, load: LoadPlan, models: Models, objectives: tuple[Objective, ...]
) -> SetupSummary:
    setup = setup_of(spec)
    traces = [(point, trace_of(point, load)) for point in load.points(spec)]
    record = PDSetup(
        name=spec.name,
        kind=spec.kind,
        connector=spec.connector,
        model=models.engine.model,
        num_prefill=spec.num_prefill,
        num_decode=spec.num_decode,
        prefill_tp=spec.prefill_tp,
        decode_tp=spec.decode_tp,
        token_budget=setup.token_budget,
        environment=_environment(models),
    )
    return _summary(record, setup, traces, models, objectives)


def simulated_replicas(
    name: str, num_devices: int, run: RunSummary, models: Models, objectives: Sequence[Objective]
) -> SetupSummary:
    """Aggregated engines on so many devices, at every point that ``run`` was measured at.

    One engine over all devices where the figures have that parallel size, else one a device.

    Raises:
        InvalidUsage: the engine's figures have neither.
    """
    sizes = {steps.tp_size for steps in models.engine.steps}
    tp_size = num_devices if num_devices in sizes else 1
    num_engines = num_devices // tp_size
    setup = Setup(kind="aggregated", num_prefill=num_engines, prefill_tp=tp_size)
    record = PDSetup(
        name=name,
        kind="aggregated",
        connector="none",
        model=models.engine.model,
        num_prefill=num_engines,
        prefill_tp=tp_size,
        token_budget=setup.token_budget,
        environment=_environment(models),
    )
    points = {}
    for one in run.serving:
        for point in one.points:
            if not point.load.trace:
                points[point.load, point.concurrency] = PDPoint(
                    concurrency=point.concurrency,
                    num_prompts=point.num_sent,
                    isl=point.load.isl,
                    osl=point.load.osl,
                    request_rate=point.load.request_rate,
                    burstiness=point.load.burstiness,
                )
    traces = [(point, trace_of(point)) for point in points.values()]
    return _summary(record, setup, traces, models, tuple(objectives))


def _environment(models: Models) -> dict[str, str]:
    found = {"simulated engine": f"{models.engine.name} ({models.engine.source})"}
    if models.transfer is not None:
        found["simulated transfers"] = models.transfer.source
    return found


def _summary(
    record: PDSetup,
    setup: Setup,
    traces: Sequence[tuple[PDPoint, Trace]],
    models: Models,
    objectives: tuple[Objective, ...],
) -> SetupSummary:
    points: list[PointSummary] = []
    texts: dict[str, str] = {}
    for point, trace in traces:
        planned = predict(setup, trace, models, objectives)
        # Of texts that differ in their numbers, that of the last point.
        texts.update((_NUMBER.sub("", text), text) for text in planned.extrapolated)
        points.append(replace(planned.summary, load=Load.of(point), concurrency=point.concurrency))
    points.sort(key=lambda point: (-point.load.isl, -point.load.osl, point.concurrency))
    findings = [Finding(f"extrapolated: {text}", serious=False) for text in texts.values()]
    return SetupSummary(record, points, findings)


def setup_of(spec: SetupSpec) -> Setup:
    """A set-up as the planner has it; its step's budget is that of ``--max-num-batched-tokens``.

    Raises:
        InvalidUsage: it is neither ``pd`` nor ``aggregated``.
    """
    if spec.kind not in ("pd", "aggregated"):
        raise InvalidUsage(f"{spec.name}: {spec.kind} is not simulated; use pd or aggregated")
    return Setup(
        kind="pd" if spec.kind == "pd" else "aggregated",
        num_prefill=spec.num_prefill,
        num_decode=spec.num_decode,
        prefill_tp=spec.prefill_tp,
        decode_tp=spec.decode_tp,
        token_budget=_budget(spec),
        first_token_from="prefill" if spec.connector == "lmcache" else "decode",
        send="layers" if spec.connector == "kvxfer" else "whole",
    )


def _budget(spec: SetupSpec) -> int:
    words = spec.prefill_args
    if _BUDGET_WORD not in words[:-1]:
        return _BUDGET
    text = words[words.index(_BUDGET_WORD) + 1]
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise InvalidUsage(f"{spec.name}: {_BUDGET_WORD} {text!r} is not a number of tokens")
    return int(text)


def trace_of(point: PDPoint, load: LoadPlan | None = None) -> Trace:
    """The requests of a point: of the load's trace, at its rate, or in a closed loop."""
    if load is not None and load.replay is not None:
        return replace(load.replay.trace, concurrency=point.concurrency)
    if point.request_rate is None:
        return closed_loop(
            isl=point.isl,
            osl=point.osl,
            concurrency=point.concurrency,
            num_requests=point.num_prompts,
        )
    trace = open_loop(
        isl=point.isl,
        osl=point.osl,
        requests_per_s=point.request_rate,
        num_requests=point.num_prompts,
        burstiness=point.burstiness,
        seed=seed_of(point),
    )
    return replace(trace, concurrency=point.concurrency)
