"""One case, measured.

Order of a case: first the proofs (the request arrives, nothing outside it changes, the contiguous
copy of the limit arrives), then the timed rounds. A round times the contiguous copy and the
request, each of a source that was just written, and checks every byte of the request on the
destination: limit and figure are interleaved, and no round's bytes can pass for another's.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvxfer.layout import CopyPlan
from kvxfer.sweep.cases import SweepCase
from kvxfer.sweep.compute import ComputeLoad
from kvxfer.sweep.describe import describe_layout, describe_sms
from kvxfer.sweep.peers.library import Mover
from kvxfer.sweep.result import ComputeEffect, Median, SweepResult
from kvxfer.sweep.rig import TIMEOUT_S, BlockTables, Rig
from kvxfer.sweep.samples import Samples, default_iters, measure_within_limit, require_possible
from kvxfer.sweep.stats import median
from kvxfer.transport import Op, Transfer, Tuning

_COMPUTE_ALONE_S = 0.5
_COMPUTE_BESIDE_S = 0.5
_Start = Callable[[], Transfer]


class Measurement:
    """The measurement of one case on a rig, moved by the rig's link or by what others use."""

    def __init__(
        self,
        case: SweepCase,
        rig: Rig,
        *,
        tuning: Tuning,
        iters: int | None,
        warmup: int,
        seed: int,
        on_round: Callable[[], None] = lambda: None,
        mover: Mover | None = None,
    ) -> None:
        self._case = case
        self._mover = mover
        self._rig = rig
        self._tuning = tuning
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
        samples, effect, notes = measure_within_limit(lambda: self._timed(compute))
        result = self._result(samples, notes, effect)
        require_possible(result.gb_per_s.max, result.limit_gb_per_s, result.physical_limit_gb_per_s)
        return result

    def _no_samples(self) -> Samples:
        return Samples(self._case.total_bytes)

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
        start = self._ready(tables, self._no_samples())
        self._transfer(start, self._no_samples())  # no wake: it would touch what must not change
        self._rig.require_delivered(seed, tables)
        self._rig.require_untouched(poison, tables)
        self._rig.fill_source_prefix(seed, self._case.total_bytes)
        self._rig.limit_copy(self._case.total_bytes)
        self._rig.require_prefix(seed, self._case.total_bytes)

    def _timed(self, compute: tuple[str, str] | None) -> tuple[Samples, ComputeEffect | None]:
        return (self._rounds(), None) if compute is None else self._rounds_beside(*compute)

    def _rounds(self) -> Samples:
        for _ in range(self._warmup):
            self._round(self._no_samples())
        samples = self._no_samples()
        for _ in range(self._iters):
            self._round(samples)
            self._on_round()
        return samples

    def _round(self, samples: Samples) -> None:
        num_bytes = self._case.total_bytes
        self._rig.fill_source_prefix(self._next_seed(), num_bytes)
        samples.limit_us.append(self._rig.limit_copy(num_bytes) * 1e6)
        seed = self._next_seed()  # not the prefix's, whose bytes are on the destination by now
        tables = self._draw_tables()
        self._rig.fill_source(seed, tables.source)
        start = self._ready(tables, samples)
        self._rig.wake()
        self._transfer(start, samples)
        self._rig.require_delivered(seed, tables)

    def _ready(self, tables: BlockTables, samples: Samples) -> _Start:
        """Plan, and what else can be done before a request starts."""
        peer, op = self._rig.peer, self._case.op
        put = op is Op.PUT
        local = tables.source if put else tables.destination
        remote = tables.destination if put else tables.source
        begin = time.perf_counter_ns()
        start = self._start_of(peer.plan(op, local, remote))
        samples.plan_us.append((time.perf_counter_ns() - begin) / 1e3)
        return start

    def _start_of(self, plan: CopyPlan) -> _Start:
        if self._mover is not None:
            return self._mover.ready(plan)
        return partial(self._rig.peer.link.post, plan, self._case.op, tuning=self._tuning)

    def _transfer(self, start: _Start, samples: Samples) -> None:
        self._complete(self._post(start, samples), samples)

    def _post(self, start: _Start, samples: Samples) -> tuple[Transfer, int]:
        begin = time.perf_counter_ns()
        transfer = start()
        samples.post_us.append((time.perf_counter_ns() - begin) / 1e3)
        return transfer, begin

    def _complete(self, posted: tuple[Transfer, int], samples: Samples) -> None:
        transfer, start = posted
        transfer.wait(TIMEOUT_S)
        samples.latency_us.append((time.perf_counter_ns() - start) / 1e3)
        samples.actual_path = transfer.actual_path
        samples.num_sms = transfer.num_sms

    def _rounds_beside(self, kind: str, side: str) -> tuple[Samples, ComputeEffect]:
        """Transfers back to back, and nothing else, for as long as the load is timed."""
        samples = Samples(self._case.total_bytes, limit_us=self._rounds().limit_us)
        tables = self._draw_tables()
        seed = self._next_seed()
        self._rig.fill_source(seed, tables.source)
        request = self._ready(tables, samples)
        if (side == "src") == (self._case.op is Op.PUT):
            load = ComputeLoad(kind, self._rig.local.cache.device)
            try:
                alone_us = _settle(load)
                self._busy(request, samples)
            finally:
                beside_us = load.close()
        else:
            self._rig.start_compute(kind)
            time.sleep(_COMPUTE_ALONE_S)
            alone_us = self._rig.stop_compute()
            self._rig.start_compute(kind)
            self._busy(request, samples)
            beside_us = self._rig.stop_compute()
        self._rig.require_delivered(seed, tables)
        return samples, ComputeEffect(kind, side, alone_us, beside_us)

    def _busy(self, request: _Start, samples: Samples) -> None:
        """The next is posted before the last is waited for: the path never runs dry."""
        start = time.perf_counter()
        posted = self._post(request, samples)
        while time.perf_counter() - start < _COMPUTE_BESIDE_S:
            following = self._post(request, samples)
            self._complete(posted, samples)
            posted = following
        self._complete(posted, samples)
        samples.busy_s = time.perf_counter() - start

    def _result(
        self, samples: Samples, notes: list[str], effect: ComputeEffect | None
    ) -> SweepResult:
        case, link = self._case, self._rig.peer.link
        on_device = case.memory == "device"
        mover = self._mover
        return SweepResult(
            transport=case.mover,
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
            sm_count=samples.num_sms,
            sm_budget=describe_sms(case.num_sms) if on_device and not mover else "",
            num_threads=mover.num_threads if mover else link.num_threads,
            iters=len(samples.latency_us),
            gb_per_s=samples.rates,
            latency_us=samples.latencies,
            limit_gb_per_s=samples.limit_gb_per_s,
            fraction_of_limit=samples.fraction,
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
            num_kv_heads=case.layout.num_kv_heads,
            src_layout=describe_layout(case.layout),
            dst_layout=describe_layout(case.layout),
            peer=case.peer,
            settings=mover.settings if mover else "",
            slots=None if mover else link.slots,
        )


def _settle(load: ComputeLoad) -> float:
    load.reset()
    time.sleep(_COMPUTE_ALONE_S)
    alone_us = load.median_us()
    load.reset()
    return alone_us
