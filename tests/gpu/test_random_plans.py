"""Random caches, plans, engines and SM budgets against plain numpy, on one GPU."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gpu_pairs import RawCopier, RawMemory
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvxfer import KVLayout, KVShard, KVView, _core, plan
from kvxfer.transport.host_copy import plan_tables

POOL_BYTES = 4 << 20
NUM_EXAMPLES = 60
ENGINES = [
    _core.CopyEngine.AUTO,
    _core.CopyEngine.BULK,
    _core.CopyEngine.LOAD_STORE,
    _core.CopyEngine.DMA,
]


@dataclass(frozen=True)
class Side:
    """A cache in a pool: offset of every plane, and distance of its blocks."""

    planes: list[int]
    stride_bytes: int
    num_blocks: int


@dataclass(frozen=True)
class Case:
    page_bytes: int
    src: Side
    dst: Side
    src_ids: list[int]
    dst_ids: list[int]
    engine: _core.CopyEngine
    num_sms: int


def draw_side(draw: Any, num_planes: int, num_blocks: int, page_bytes: int) -> Side:
    stride = page_bytes + 16 * draw(st.sampled_from([0, 0, 1, 5]))
    span = num_blocks * stride
    # Planes in any order, with gaps, and none over another.
    room = (POOL_BYTES - num_planes * span) // 16
    cuts = sorted(draw(st.integers(0, room)) for _ in range(num_planes))
    starts = [cut * 16 + index * span for index, cut in enumerate(cuts)]
    return Side(draw(st.permutations(starts)), stride, num_blocks)


@st.composite
def cases(draw: Any) -> Case:
    page_bytes = 16 * draw(
        st.one_of(st.integers(1, 64), st.integers(1, 1300), st.sampled_from([256, 512, 1024, 4097]))
    )
    num_planes = draw(st.integers(1, 6))
    most = min(60, POOL_BYTES // (num_planes * (page_bytes + 80)))
    src_blocks, dst_blocks = draw(st.integers(1, most)), draw(st.integers(1, most))
    count = draw(st.integers(0, dst_blocks))
    src_ids = draw(st.lists(st.integers(0, src_blocks - 1), min_size=count, max_size=count))
    dst_ids = draw(st.permutations(range(dst_blocks)))[:count]
    return Case(
        page_bytes,
        draw_side(draw, num_planes, src_blocks, page_bytes),
        draw_side(draw, num_planes, dst_blocks, page_bytes),
        src_ids,
        dst_ids,
        draw(st.sampled_from(ENGINES)),
        draw(st.sampled_from([0, 1, 2, 6, 7, 8, 12, 24, 40])),
    )


def view_of(memory: RawMemory, side: Side, layout: KVLayout) -> KVView:
    addresses = np.array([memory.address + plane for plane in side.planes], np.uint64)
    return KVView(
        KVShard(layout),
        side.num_blocks,
        addresses=addresses[:, None],
        block_stride_bytes=side.stride_bytes,
        token_stride_bytes=layout.vector_bytes,
        head_stride_bytes=layout.vector_bytes,
    )


def copy_in_numpy(case: Case, src: RawMemory, dst: RawMemory) -> None:
    for from_plane, to_plane in zip(case.src.planes, case.dst.planes, strict=True):
        for from_id, to_id in zip(case.src_ids, case.dst_ids, strict=True):
            begin = from_plane + from_id * case.src.stride_bytes
            end = to_plane + to_id * case.dst.stride_bytes
            dst.model[end : end + case.page_bytes] = src.model[begin : begin + case.page_bytes]


@pytest.fixture(scope="module")
def pools() -> tuple[RawMemory, RawMemory, RawCopier]:
    return RawMemory(POOL_BYTES, seed=1), RawMemory(POOL_BYTES, seed=2), RawCopier()


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=cases())
def test_a_plan_does_what_numpy_does(
    pools: tuple[RawMemory, RawMemory, RawCopier], case: Case
) -> None:
    src, dst, copier = pools
    if case.engine == _core.CopyEngine.BULK and _core.device_info(0).compute_major < 9:
        case = Case(**(vars(case) | {"engine": _core.CopyEngine.AUTO}))
    event(case.engine.name)
    layout = KVLayout(
        len(case.src.planes), 1, head_dim=case.page_bytes, dtype="uint8", block_size=1, kv="mla"
    )
    copy = plan(
        view_of(src, case.src, layout), view_of(dst, case.dst, layout), case.src_ids, case.dst_ids
    )
    copy_in_numpy(case, src, dst)
    used = copier.run(plan_tables(copy), engine=case.engine, num_sms=case.num_sms)
    assert used == case.engine or case.engine == _core.CopyEngine.AUTO
    dst.check()
    src.check()
    dst.fill(case.page_bytes + len(case.src_ids))


def test_the_oracle_sees_one_page_too_few(pools: tuple[RawMemory, RawMemory, RawCopier]) -> None:
    src, dst, copier = pools
    side = Side([0, 4096], 256, 8)
    case = Case(256, side, side, [1, 2, 3], [5, 6, 7], _core.CopyEngine.AUTO, 0)
    layout = KVLayout(2, 1, head_dim=256, dtype="uint8", block_size=1, kv="mla")
    copy_in_numpy(case, src, dst)
    copy = plan(view_of(src, side, layout), view_of(dst, side, layout), [1, 2], [5, 6])
    copier.run(plan_tables(copy))
    with pytest.raises(AssertionError, match="bytes are wrong, the first at"):
        dst.check()
    dst.fill(2)
