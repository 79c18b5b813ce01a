"""One case, measured.

Order of a case: first the proofs (the request arrives, nothing outside it changes, the contiguous
copy of the limit arrives), then the timed rounds. A round times the contiguous copy, writes a new
pattern on the source, times the request and checks every byte of it on the destination: limit and
figure are interleaved, and no round's bytes can pass for another's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvxfer.errors import VerificationError
from kvxfer.sweep.cases import SweepCase
from kvxfer.sweep.compute import ComputeLoad
from kvxfer.sweep.result import ComputeEffect, Latency, Median, Rate, SweepResult
from kvxfer.sweep.rig import TIMEOUT_S, BlockTables, Rig
from kvxfer.sweep.stats import median, percentile
from kvxfer.transport import Op, Tuning
from kvxfer.units import gb_per_s

_ABOVE_LIMIT = 1.03
_COMPUTE_ALONE_S = 0.5
# Rounds by the size of a request: enough for a p99 where a round is short.
_ITERS_BY_BYTES = ((1 << 20, 500), (64 << 20, 100))
_ITERS_LARGE = 20


@dataclass(slots=True)
class _Samples:
    latency_us: list[float] = field(default_factory=list)
    plan_us: list[float] = field(default_factory=list)
    post_us: list[float] = field(default_factory=list)
    limit_us: list[float] = field(default_factory=list)
    actual_path: str = ""


def default_iters(total_bytes: int) -> int:
    """Timed rounds for a request of this size."""
    for limit_bytes, iters in _ITERS_BY_BYTES:
        if total_bytes < limit_bytes:
            return iters
    return _ITERS_LARGE


class Measurement:
    """The measurement of one case on a rig."""

    def __init__(
        self,
        case: SweepCase,
        rig: Rig,
        *,
        tuning: Tuning,
        num_threads: int,
        iters: int | None,
        warmup: int,
        seed: int,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        self._case = case
        self._rig = rig
        self._tuning = tuning
        self._num_threads = num_threads
        self._iters = iters or default_iters(case.total_bytes)
        self._warmup = warmup
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._on_round = on_round
        self._contiguous = rig.contiguous_plan(case.total_bytes)

    def run(self, compute: tuple[str, str] | None = None) -> SweepResult:
        """Prove, then time.

        Args:
            compute: (kind, side ``src`` or ``dst``) of a load to run beside the transfers.

        Raises:
            VerificationError: wrong bytes, or a figure above the physical limit.
        """
        self._prove()
        notes: list[str] = []
        samples, effect = self._timed(compute)
        if self._fraction(samples) > _ABOVE_LIMIT:
            samples, effect = self._timed(compute)
            if self._fraction(samples) > _ABOVE_LIMIT:
                notes.append(self._above_limit_note(samples))
        result = self._result(samples, notes, effect)
        require_possible(result.gb_per_s.max, result.limit_gb_per_s, result.physical_limit_gb_per_s)
        return result

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed

    def _draw_tables(self) -> BlockTables:
        draw = self._case.block_order.draw
        count, pool = self._case.num_blocks, self._case.pool_blocks
        return BlockTables(draw(count, pool, self._rng), draw(count, pool, self._rng))

    def _prove(self) -> None:
        poison = self._next_seed()
        seed = self._next_seed()
        tables = self._draw_tables()
        self._rig.fill_source(seed)
        self._rig.fill_destination(poison)
        self._transfer(tables, _Samples())
        self._rig.require_delivered(seed, tables)
        self._rig.require_untouched(poison, tables)
        self._copy_contiguous(_Samples(), self._rig.peer.link.limit_tuning())
        self._rig.require_prefix(seed, self._case.total_bytes)

    def _timed(self, compute: tuple[str, str] | None) -> tuple[_Samples, ComputeEffect | None]:
        return (self._rounds(), None) if compute is None else self._rounds_beside(*compute)

    def _rounds(self) -> _Samples:
        for _ in range(self._warmup):
            self._round(_Samples())
        samples = _Samples()
        for _ in range(self._iters):
            self._round(samples)
            self._on_round()
        return samples

    def _round(self, samples: _Samples) -> None:
        self._copy_contiguous(samples, self._rig.peer.link.limit_tuning())
        seed = self._next_seed()
        tables = self._draw_tables()
        self._rig.fill_source(seed, tables.source)
        self._transfer(tables, samples)
        self._rig.require_delivered(seed, tables)

    def _transfer(self, tables: BlockTables, samples: _Samples) -> None:
        peer, op = self._rig.peer, self._case.op
        put = op is Op.PUT
        local = tables.source if put else tables.destination
        remote = tables.destination if put else tables.source
        self._rig.wake()
        start = time.perf_counter_ns()
        plan = peer.plan(op, local, remote)
        planned = time.perf_counter_ns()
        transfer = peer.link.post(plan, op, tuning=self._tuning)
        posted = time.perf_counter_ns()
        transfer.wait(TIMEOUT_S)
        done = time.perf_counter_ns()
        samples.plan_us.append((planned - start) / 1e3)
        samples.post_us.append((posted - planned) / 1e3)
        samples.latency_us.append((done - planned) / 1e3)
        samples.actual_path = transfer.actual_path

    def _copy_contiguous(self, samples: _Samples, tuning: Tuning) -> None:
        self._rig.wake()
        start = time.perf_counter_ns()
        self._rig.peer.link.post(self._contiguous, self._case.op, tuning=tuning).wait(TIMEOUT_S)
        samples.limit_us.append((time.perf_counter_ns() - start) / 1e3)

    def _rounds_beside(self, kind: str, side: str) -> tuple[_Samples, ComputeEffect]:
        """Rounds of the request alone, back to back, so that the load is never without them."""
        limits = self._rounds()
        if (side == "src") == (self._case.op is Op.PUT):
            load = ComputeLoad(kind, self._rig.local.cache.device)
            try:
                alone_us = _settle(load)
                samples = self._busy_rounds(limits)
            finally:
                beside_us = load.close()
        else:
            self._rig.start_compute(kind)
            time.sleep(_COMPUTE_ALONE_S)
            alone_us = self._rig.stop_compute()
            self._rig.start_compute(kind)
            samples = self._busy_rounds(limits)
            beside_us = self._rig.stop_compute()
        return samples, ComputeEffect(kind, side, alone_us, beside_us)

    def _busy_rounds(self, limits: _Samples) -> _Samples:
        samples = _Samples(limit_us=limits.limit_us)
        tables = self._draw_tables()
        seed = self._next_seed()
        self._rig.fill_source(seed, tables.source)
        deadline = time.monotonic() + _COMPUTE_ALONE_S
        while time.monotonic() < deadline:
            self._transfer(tables, samples)
        self._rig.require_delivered(seed, tables)
        return samples

    def _fraction(self, samples: _Samples) -> float:
        return median(samples.limit_us) / median(samples.latency_us)

    def _above_limit_note(self, samples: _Samples) -> str:
        return f"{self._fraction(samples):.2f} of the contiguous copy, measured twice, interleaved"

    def _result(
        self, samples: _Samples, notes: list[str], effect: ComputeEffect | None
    ) -> SweepResult:
        case, link = self._case, self._rig.peer.link
        rates = [gb_per_s(case.total_bytes, value / 1e6) for value in samples.latency_us]
        limit = gb_per_s(case.total_bytes, median(samples.limit_us) / 1e6)
        on_device = case.memory == "device"
        return SweepResult(
            transport=case.transport,
            model=case.model,
            num_tokens=case.num_tokens,
            block_size=case.layout.block_size,
            page_bytes=case.layout.page_bytes,
            num_pages=case.num_pages,
            total_bytes=case.total_bytes,
            src_tp=1,
            dst_tp=1,
            order=case.layout.order.value,
            block_order=case.block_order.text,
            sm_count=case.num_sms if on_device else 0,
            num_threads=0 if on_device else self._num_threads,
            iters=len(samples.latency_us),
            gb_per_s=Rate(median(rates), min(rates), max(rates)),
            latency_us=Latency(*(percentile(samples.latency_us, q) for q in (50, 90, 99))),
            limit_gb_per_s=limit,
            fraction_of_limit=median(rates) / limit,
            plan_us=Median(median(samples.plan_us)),
            post_us=Median(median(samples.post_us)),
            verified=True,
            actual_path=samples.actual_path,
            notes=notes,
            op=case.op.value,
            memory=case.memory,
            dtype=case.layout.dtype,
            physical_limit_gb_per_s=link.physical_limit_gb_per_s,
            compute=effect,
        )


def _settle(load: ComputeLoad) -> float:
    load.reset()
    time.sleep(_COMPUTE_ALONE_S)
    alone_us = load.median_us()
    load.reset()
    return alone_us


def require_possible(fastest: float, contiguous: float, limit: float | None) -> None:
    """Refuse a figure that the hardware cannot have done.

    Args:
        fastest: the fastest round, GB/s.
        contiguous: the measured limit, GB/s.
        limit: the physical limit, GB/s; None = unknown.

    Raises:
        VerificationError: one of the two is above the physical limit.
    """
    if limit is not None and max(fastest, contiguous) > limit:
        raise VerificationError(
            f"{fastest:.1f} GB/s (contiguous {contiguous:.1f}) is above the physical limit of "
            f"{limit:.1f} GB/s: the measurement is wrong, do not use it"
        )
