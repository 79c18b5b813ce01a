"""One row of ranks, measured in the order and by the rules of :mod:`kvxfer.sweep.measure`."""

from collections import Counter
from collections.abc import Callable

import numpy as np

from kvxfer.sweep.describe import describe_layout, describe_sms
from kvxfer.sweep.ranks.cases import RankCase
from kvxfer.sweep.ranks.rig import Ids, RankRig
from kvxfer.sweep.result import Median, SweepResult
from kvxfer.sweep.samples import Samples, default_iters, measure_within_limit, require_possible
from kvxfer.sweep.stats import median
from kvxfer.transport import Tuning


class RankMeasurement:
    """The measurement of one row on a rig."""

    def __init__(
        self,
        case: RankCase,
        rig: RankRig,
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

    def run(self) -> SweepResult:
        """Prove, then time.

        Raises:
            VerificationError: wrong bytes, or a figure above the physical limit.
        """
        self._prove()
        samples, spreads, notes = measure_within_limit(self._rounds)
        result = self._result(samples, spreads, notes)
        require_possible(result.gb_per_s.max, result.limit_gb_per_s, result.physical_limit_gb_per_s)
        return result

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed

    def _draw_tables(self) -> tuple[Ids, Ids]:
        """Of the sources and of the destinations; all ranks of a side share one, as in engines."""
        draw = self._case.block_order.draw
        src, dst = self._case.src, self._case.dst
        return (
            draw(src.num_blocks, src.pool_blocks, self._rng),
            draw(dst.num_blocks, dst.pool_blocks, self._rng),
        )

    def _prove(self) -> None:
        poison, seed = self._next_seed(), self._next_seed()
        src_ids, dst_ids = self._draw_tables()
        self._rig.fill_source(seed)
        self._rig.fill_destination(poison)
        self._rig.plan_request(src_ids, dst_ids)
        self._rig.run_request(self._tuning)
        self._rig.require_delivered(seed, src_ids, dst_ids)
        self._rig.require_untouched(poison, dst_ids)
        limit_seed = self._next_seed()
        self._rig.fill_limit_ranges(limit_seed)
        self._rig.run_limit()
        self._rig.require_limit(limit_seed)

    def _rounds(self) -> tuple[Samples, list[float]]:
        """Timed rounds, and how far apart the fastest and the slowest rank of each were."""
        for _ in range(self._warmup):
            self._round(Samples(self._case.total_bytes), [])
        samples, spreads = Samples(self._case.total_bytes), list[float]()
        for _ in range(self._iters):
            self._round(samples, spreads)
            self._on_round()
        return samples, spreads

    def _round(self, samples: Samples, spreads: list[float]) -> None:
        self._rig.fill_limit_ranges(self._next_seed())
        samples.limit_us.append(self._rig.run_limit().latency_us)
        seed = self._next_seed()
        src_ids, dst_ids = self._draw_tables()
        self._rig.fill_source(seed, src_ids)
        samples.plan_us.append(self._rig.plan_request(src_ids, dst_ids))
        times = self._rig.run_request(self._tuning)
        samples.latency_us.append(times.latency_us)
        samples.post_us.append(times.post_us)
        samples.actual_path = " and ".join(times.paths)
        samples.num_sms = times.num_sms
        spreads.append(max(times.rank_us) / min(times.rank_us))
        self._rig.require_delivered(seed, src_ids, dst_ids)

    def _result(self, samples: Samples, spreads: list[float], notes: list[str]) -> SweepResult:
        case, plans = self._case, [plan for own in self._rig.plans for plan in own]
        src, dst = case.src, case.dst
        on_device = case.memory == "device"
        runs: Counter[int] = Counter()
        for plan in plans:
            runs.update(plan.runs)
        num_pages = sum(plan.num_pages for plan in plans)
        return SweepResult(
            transport=case.transport,
            model=case.model,
            num_tokens=case.num_tokens,
            block_size=src.layout.block_size,
            page_bytes=case.total_bytes // num_pages,
            num_pages=num_pages,
            total_bytes=case.total_bytes,
            src_tp=src.tp,
            dst_tp=dst.tp,
            order=src.layout.order.value,
            block_order=case.block_order.text,
            sm_count=samples.num_sms,
            sm_budget=describe_sms(case.num_sms) if on_device else "",
            num_threads=0 if on_device else self._num_threads,
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
            dtype=src.layout.dtype,
            physical_limit_gb_per_s=self._rig.physical_limit_gb_per_s(),
            num_kv_heads=src.layout.num_kv_heads,
            src_layout=describe_layout(src.layout),
            dst_layout=describe_layout(dst.layout),
            src_pp=src.pp,
            dst_pp=dst.pp,
            convert=f"{src.layout.dtype} to {dst.layout.dtype}" if case.convert else "",
            run_bytes=max(runs, key=lambda run_bytes: run_bytes * runs[run_bytes]),
            num_runs=runs.total(),
            rank_spread=median(spreads),
        )
