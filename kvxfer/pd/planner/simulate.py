"""A trace through a set-up, event by event."""

from collections.abc import Iterator

import msgspec
import numpy as np

from kvxfer.errors import InvalidUsage
from kvxfer.layout.kv_layout import DTYPE_BYTES, canonical_dtype
from kvxfer.pd.planner.engine_model import EngineModel, StepModel
from kvxfer.pd.planner.jitter import Jitter
from kvxfer.pd.planner.kv_size import KVSize
from kvxfer.pd.planner.setup import Setup
from kvxfer.pd.planner.simulated import SimulatedRun
from kvxfer.pd.planner.simulation.cluster import Cluster
from kvxfer.pd.planner.simulation.job import Job
from kvxfer.pd.planner.times import Times
from kvxfer.pd.planner.trace import Trace
from kvxfer.pd.planner.transfer_model import TransferModel

_FP8 = "fp8_e4m3"


def simulate(
    setup: Setup,
    trace: Trace,
    engine: EngineModel,
    kv: KVSize,
    transfer: TransferModel | None = None,
) -> SimulatedRun:
    """Run every request of ``trace`` to its end; the same arguments give the same run.

    Args:
        kv: of the engine's own dtype; ``setup.strategy.kv_dtype`` narrows it.
        transfer: for a PD set-up; None: a hand-over takes no time.

    Raises:
        InvalidUsage: the engine has no figures for a TP size, a request does not fit an engine's KV
            memory, or ``transfer`` is strict and something lies outside its measurements.
    """
    narrowed = setup.strategy.kv_dtype == "fp8" and DTYPE_BYTES[canonical_dtype(kv.dtype)] > 1
    if narrowed:
        factor = 1 / DTYPE_BYTES[canonical_dtype(kv.dtype)]
        engine, kv = _narrow(engine, factor), kv.narrowed(factor, _FP8)
    cluster = Cluster(setup, trace, engine, kv, transfer)
    cluster.run()
    from_transfers = cluster.findings()
    if transfer is not None and transfer.strict and from_transfers:
        raise InvalidUsage(f"outside the measured transfers: {'; '.join(from_transfers)}")
    findings = [*_beyond(cluster, trace), *from_transfers]
    if narrowed:
        findings.append("fp8 KV: attention taken as faster by its fewer bytes, not measured")
    return _collect(setup, cluster, engine, findings)


def _narrow(engine: EngineModel, factor: float) -> EngineModel:
    """The engine with a cache of so many times the bytes: more fits, and attention reads less."""

    def steps(one: StepModel) -> StepModel:
        capacity = one.kv_capacity_tokens
        return msgspec.structs.replace(
            one,
            context_s=one.context_s * factor,
            kv_capacity_tokens=None if capacity is None else int(capacity / factor),
        )

    return msgspec.structs.replace(
        engine, kv_dtype=_FP8, steps=[steps(one) for one in engine.steps]
    )


def _beyond(cluster: Cluster, trace: Trace) -> Iterator[str]:
    """Where engines went beyond what their figures come from, a text for each TP size and kind."""
    longest = max(request.num_prompt_tokens for request in trace.requests)
    by_tp: dict[int, tuple[StepModel, int, int]] = {}
    for steps, engine in zip(cluster.models, cluster.engines, strict=True):
        _, decoding, context = by_tp.get(steps.tp_size, (steps, 0, 0))
        most = max(decoding, engine.most_decoding), max(context, engine.most_context)
        by_tp[steps.tp_size] = (steps, *most)
    for tp_size, (steps, decoding, context) in by_tp.items():
        measured = steps.measured
        for name, reached, limit in (
            ("sequences at once", decoding, measured.num_decoding),
            ("tokens of context at once", context, measured.num_context_tokens),
            ("tokens of a prompt", longest, measured.num_prompt_tokens),
        ):
            if reached > limit:
                yield f"TP {tp_size}: {reached} {name}; measured to {limit}"


def _collect(
    setup: Setup, cluster: Cluster, engine: EngineModel, findings: list[str]
) -> SimulatedRun:
    jobs, engines = cluster.jobs, cluster.engines
    sent_s = np.array([job.sent_s for job in jobs])
    first_s = np.array([job.first_s for job in jobs])
    last_s = np.array([job.last_s for job in jobs])
    first_gap_s = np.array([_first_gap_s(cluster, job) for job in jobs])
    together = engine.first_tokens_together and not (
        setup.kind == "pd" and setup.first_token_from == "prefill"
    )
    duration_s = float(last_s.max() - sent_s.min())
    jitter = Jitter.of(cluster.models[-1])
    gaps, later_gaps = _gaps(cluster, jitter, together)
    gap_moved_s = np.nan_to_num(first_gap_s) if together else 0.0
    return SimulatedRun(
        setup=setup,
        sent_s=sent_s,
        ttft_s=first_s - sent_s + gap_moved_s,
        first_gap_s=np.where(np.isnan(first_gap_s), np.nan, 0.0) if together else first_gap_s,
        e2el_s=last_s - sent_s,
        queue_s=np.array([job.started_s for job in jobs]) - sent_s,
        transfer_s=np.array([job.transfer_s for job in jobs]),
        num_prompt_tokens=np.array([job.request.num_prompt_tokens for job in jobs]),
        num_output_tokens=np.array([job.request.num_output_tokens for job in jobs]),
        num_hit_tokens=np.array([job.hit_tokens for job in jobs]),
        gaps=gaps,
        later_gaps=later_gaps,
        duration_s=duration_s,
        peak_kv_tokens=tuple(one.memory.peak_tokens for one in engines),
        kv_capacity_tokens=tuple(one.memory.capacity_tokens for one in engines),
        num_preempted=tuple(one.num_preempted for one in engines),
        busy=tuple(one.busy_s / duration_s for one in engines),
        extrapolated=tuple(findings),
        timelines=[one.timeline for one in engines],
        pieces=[job.pieces for job in jobs],
        jitter=jitter,
        first_tokens_together=together,
    )


def _first_gap_s(cluster: Cluster, job: Job) -> float:
    if not job.pieces:
        return float("nan")
    piece = job.pieces[0]
    if isinstance(piece, tuple):
        return cluster.engines[piece[0]].timeline.step_s[piece[1]]
    return piece


def _gaps(cluster: Cluster, jitter: Jitter, together: bool) -> tuple[Times, Times]:
    """All gaps, and all but the first of each request: those of timelines, then others."""
    lengths = [len(one.timeline) for one in cluster.engines]
    offsets = np.cumsum([0, *lengths])
    values_s = np.concatenate([np.array(one.timeline.step_s, float) for one in cluster.engines])
    counts = np.concatenate(
        [
            np.array(one.timeline.num_steps, float) * np.array(one.timeline.num_gaps, float)
            for one in cluster.engines
        ]
    )
    firsts: list[int] = []
    own_first_s: list[float] = []
    own_later_s: list[float] = []
    for job in cluster.jobs:
        for at, piece in enumerate(job.pieces):
            if not isinstance(piece, tuple):
                (own_later_s if at else own_first_s).append(piece)
            elif not at:
                firsts.append(int(offsets[piece[0]]) + piece[1])
    later_counts = counts.copy()
    np.subtract.at(later_counts, firsts, 1.0)
    later = (
        np.concatenate([values_s, own_later_s]),
        np.concatenate([later_counts, np.ones(len(own_later_s))]),
    )
    num_gaps = np.concatenate([np.array(one.timeline.num_gaps) for one in cluster.engines])
    is_alone = np.concatenate([num_gaps == 1, np.zeros(len(own_later_s), bool)])
    first_s = np.concatenate([values_s[firsts], own_first_s])
    if together:
        first_s = np.zeros(len(first_s))
    later_gaps = jitter.spread(*later, is_alone)
    pooled_s = np.concatenate([later_gaps.values_s, first_s])
    pooled = np.concatenate([later_gaps.counts, np.ones(len(first_s))])
    return Times.of(pooled_s, pooled), later_gaps
