"""The plans of all pairs of ranks, for caches that do not exist: nothing is allocated."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvxfer.layout import (
    BlockMap,
    CopyPlan,
    KVLayout,
    KVShard,
    KVView,
    Route,
    Share,
    ToFp8,
    TPLayout,
    require_compatible,
    shares,
)
from kvxfer.report.plan_result import PairPlan, Part, RankPart

# The caches lie at made-up addresses; a plan reads none.
_SRC_ADDRESS, _DST_ADDRESS = 1 << 44, 1 << 45
_NUM_TIMINGS = 5
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlans:
    """Plans of one request; the times are one entry a source rank."""

    src: tuple[RankPart, ...]
    dst: tuple[RankPart, ...]
    pairs: tuple[PairPlan, ...]
    route_us: tuple[float, ...]
    plan_us: tuple[float, ...]


def plan_pairs(
    src: KVLayout,
    dst: KVLayout,
    src_ranks: tuple[TPLayout, ...],
    dst_ranks: tuple[TPLayout, ...],
    *,
    num_tokens: int,
    prefix: int = 0,
    convert: ToFp8 | None = None,
) -> RequestPlans:
    """Plan a request of ``num_tokens``, of which the destination holds the first ``prefix``.

    Raises:
        LayoutMismatch: a cache of ``src`` cannot be copied into one of ``dst``.
        InvalidUsage: more pipeline ranks than layers.
    """
    require_compatible(src, dst, convert)
    sources = [KVShard(src, rank) for rank in src_ranks]
    targets = [KVShard(dst, rank) for rank in dst_ranks]
    tables = [_shuffled(layout.num_blocks(num_tokens)) for layout in (src, dst)]

    def match() -> BlockMap:
        return BlockMap(
            *tables,
            src_block_size=src.block_size,
            dst_block_size=dst.block_size,
            tokens=range(prefix, num_tokens),
        )

    pairs: list[PairPlan] = []
    route_us, plan_us = [], []
    for number, source in enumerate(sources):
        sent = {n: found for n, to in enumerate(targets) if (found := shares(source, to))}
        view = KVView.dense(source, tables[0].size, _SRC_ADDRESS)
        views = [KVView.dense(targets[n], tables[1].size, _DST_ADDRESS) for n in sent]
        began = time.perf_counter()
        routes = [Route(view, to, convert=convert) for to in views]
        route_us.append((time.perf_counter() - began) * 1e6)
        plans, took_us = _plan(routes, match)
        plan_us.append(took_us)
        pairs += [
            _pair(number, target, found, plan)
            for (target, found), plan in zip(sent.items(), plans, strict=True)
        ]
    return RequestPlans(
        src=_parts(sources),
        dst=_parts(targets),
        pairs=tuple(pairs),
        route_us=tuple(route_us),
        plan_us=tuple(plan_us),
    )


def _plan(routes: list[Route], match: Callable[[], BlockMap]) -> tuple[list[CopyPlan], float]:
    """The plans of one source rank, and the median time of making them in µs."""
    times_s = []
    for _ in range(_NUM_TIMINGS):
        began = time.perf_counter()
        blocks = match()
        plans = [route.plan(blocks) for route in routes]
        times_s.append(time.perf_counter() - began)
    return plans, statistics.median(times_s) * 1e6


def _pair(src: int, dst: int, found: tuple[Share, ...], plan: CopyPlan) -> PairPlan:
    return PairPlan(
        src=src,
        dst=dst,
        parts=tuple(Part(share.layers, share.heads) for share in found),
        num_bytes=plan.total_bytes,
        num_runs=plan.num_runs,
        run_bytes=tuple(sorted({box.run_bytes for box in plan.boxes})),
        num_pages=plan.num_pages,
        num_boxes=len(plan.boxes),
        table_bytes=plan.table_bytes,
    )


def _shuffled(num_blocks: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Block ids as a pool hands them out after a while."""
    return np.random.default_rng(_SEED).permutation(num_blocks)


def _parts(shards: list[KVShard]) -> tuple[RankPart, ...]:
    return tuple(
        RankPart(shard.rank.pp_rank, shard.rank.tp_rank, Part(shard.layers, shard.heads))
        for shard in shards
    )
