"""One case, measured.

Order of a case: first the proofs (the request arrives, nothing outside it changes, the contiguous
copy of the limit arrives), then the timed rounds. A round times the contiguous copy and the
request, each of a source that was just written, and checks every byte of the request on the
destination: limit and figure are interleaved, and no round's bytes can pass for another's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvxfer.errors import VerificationError
from kvxfer.layout import CopyPlan
from kvxfer.sweep.cases import SweepCase
from kvxfer.sweep.compute import ComputeLoad
from kvxfer.sweep.result import ComputeEffect, Latency, Median, Rate, SweepResult
from kvxfer.sweep.rig import TIMEOUT_S, BlockTables, Rig
from kvxfer.sweep.stats import median, percentile
from kvxfer.transport import Op, Transfer, Tuning
from kvxfer.units import gb_per_s

_ABOVE_LIMIT = 1.03
_COMPUTE_ALONE_S = 0.5
_COMPUTE_BESIDE_S = 0.5
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
    busy_s: float | None = None  # wall time of transfers without a pause between them


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
        plan = self._plan(tables, _Samples())
        self._transfer(plan, _Samples())  # no wake: it would touch what must not change
        self._rig.require_delivered(seed, tables)
        self._rig.require_untouched(poison, tables)
        self._rig.fill_destination(poison)  # else the request's bytes could pass for the copy's
        self._rig.limit_copy(self._case.total_bytes)
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
        num_bytes = self._case.total_bytes
        self._rig.fill_source_prefix(self._next_seed(), num_bytes)
        samples.limit_us.append(self._rig.limit_copy(num_bytes) * 1e6)
        seed = self._next_seed()  # not the prefix's, whose bytes are on the destination by now
        tables = self._draw_tables()
        self._rig.fill_source(seed, tables.source)
        plan = self._plan(tables, samples)
        self._rig.wake()
        self._transfer(plan, samples)
        self._rig.require_delivered(seed, tables)

    def _plan(self, tables: BlockTables, samples: _Samples) -> CopyPlan:
        peer, op = self._rig.peer, self._case.op
        put = op is Op.PUT
        local = tables.source if put else tables.destination
        remote = tables.destination if put else tables.source
        start = time.perf_counter_ns()
        plan = peer.plan(op, local, remote)
        samples.plan_us.append((time.perf_counter_ns() - start) / 1e3)
        return plan

    def _transfer(self, plan: CopyPlan, samples: _Samples) -> None:
        self._complete(self._post(plan, samples), samples)

    def _post(self, plan: CopyPlan, samples: _Samples) -> tuple[Transfer, int]:
        start = time.perf_counter_ns()
        transfer = self._rig.peer.link.post(plan, self._case.op, tuning=self._tuning)
        samples.post_us.append((time.perf_counter_ns() - start) / 1e3)
        return transfer, start

    def _complete(self, posted: tuple[Transfer, int], samples: _Samples) -> None:
        transfer, start = posted
        transfer.wait(TIMEOUT_S)
        samples.latency_us.append((time.perf_counter_ns() - start) / 1e3)
        samples.actual_path = transfer.actual_path

    def _rounds_beside(self, kind: str, side: str) -> tuple[_Samples, ComputeEffect]:
        """Transfers back to back, and nothing else, for as long as the load is timed."""
        samples = _Samples(limit_us=self._rounds().limit_us)
        tables = self._draw_tables()
        seed = self._next_seed()
        self._rig.fill_source(seed, tables.source)
        plan = self._plan(tables, samples)
        if (side == "src") == (self._case.op is Op.PUT):
            load = ComputeLoad(kind, self._rig.local.cache.device)
            try:
                alone_us = _settle(load)
                self._busy(plan, samples)
            finally:
                beside_us = load.close()
        else:
            self._rig.start_compute(kind)
            time.sleep(_COMPUTE_ALONE_S)
            alone_us = self._rig.stop_compute()
            self._rig.start_compute(kind)
            self._busy(plan, samples)
            beside_us = self._rig.stop_compute()
        self._rig.require_delivered(seed, tables)
        return samples, ComputeEffect(kind, side, alone_us, beside_us)

    def _busy(self, plan: CopyPlan, samples: _Samples) -> None:
        """The next is posted before the last is waited for: the path never runs dry."""
        start = time.perf_counter()
        posted = self._post(plan, samples)
        while time.perf_counter() - start < _COMPUTE_BESIDE_S:
            following = self._post(plan, samples)
            self._complete(posted, samples)
            posted = following
        self._complete(posted, samples)
        samples.busy_s = time.perf_counter() - start

    def _rates(self, samples: _Samples) -> Rate:
        num_bytes = self._case.total_bytes
        if samples.busy_s is not None:
            rate = gb_per_s(num_bytes * len(samples.latency_us), samples.busy_s)
            return Rate(rate, rate, rate)
        rates = [gb_per_s(num_bytes, value / 1e6) for value in samples.latency_us]
        return Rate(median(rates), min(rates), max(rates))

    def _limit(self, samples: _Samples) -> float:
        return gb_per_s(self._case.total_bytes, median(samples.limit_us) / 1e6)

    def _fraction(self, samples: _Samples) -> float:
        return self._rates(samples).p50 / self._limit(samples)

    def _above_limit_note(self, samples: _Samples) -> str:
        return f"{self._fraction(samples):.2f} of the contiguous copy, measured twice, interleaved"

    def _result(
        self, samples: _Samples, notes: list[str], effect: ComputeEffect | None
    ) -> SweepResult:
        case, link = self._case, self._rig.peer.link
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
            gb_per_s=self._rates(samples),
            latency_us=Latency(*(percentile(samples.latency_us, q) for q in (50, 90, 99))),
            limit_gb_per_s=self._limit(samples),
            fraction_of_limit=self._fraction(samples),
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
