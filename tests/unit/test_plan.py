"""plan() and Route: how few and how long the runs are, what is shared, what is refused.

That the bytes are right is the matter of test_reshard.py.
"""

import dataclasses
from itertools import product
from typing import Any

import numpy as np
import pytest
from carry_out import carry_out, runs
from kv_oracle import KINDS, ORDERS

from kvxfer.errors import InvalidUsage, LayoutMismatch
from kvxfer.layout import (
    BlockMap,
    BlockTable,
    CopyPlan,
    KVLayout,
    KVShard,
    KVView,
    Route,
    ToFp8,
    TPLayout,
    match_blocks,
    plan,
)

LAYOUT = KVLayout(3, 4, head_dim=8, block_size=4)
WHOLE = TPLayout()


def view(
    layout: KVLayout = LAYOUT,
    rank: TPLayout = WHOLE,
    *,
    num_blocks: int = 8,
    address: int = 0,
    **changes: object,
) -> KVView:
    model = dataclasses.replace(layout, **changes)  # type: ignore[arg-type]
    return KVView.dense(KVShard(model, rank), num_blocks, address)


def run_bytes(made: CopyPlan) -> set[int]:
    return {box.run_bytes for box in made.boxes}


# What merges into a run.


@pytest.mark.parametrize(("kv", "order"), [*product(KINDS, ORDERS)])
def test_equal_layouts_move_whole_pages(kv: str, order: str) -> None:
    same = view(kv=kv, order=order)
    made = plan(same, same, [1, 2], [3, 4])
    assert run_bytes(made) == {same.layout.page_bytes}
    assert made.num_runs == made.num_pages == 2 * same.layout.num_planes
    assert made.total_bytes == 2 * same.layout.block_bytes


def test_latents_move_as_whole_pages_too() -> None:
    same = view(KVLayout(3, 1, head_dim=8, kv="mla"))
    assert run_bytes(plan(same, same, [1], [3])) == {same.layout.page_bytes}


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        # Vectors have 16 bytes, pages of K 4 tokens of 4 heads.
        ({"order": "nhd"}, {"order": "hnd"}, 16),
        ({"order": "hnd"}, {"order": "nhd"}, 16),
        ({"kv": "split"}, {"kv": "packed"}, 256),
        ({"kv": "chunked"}, {"kv": "split"}, 256),
        ({"kv": "split"}, {"kv": "head_packed"}, 16),
        ({"kv": "head_packed"}, {"kv": "head_packed", "order": "hnd"}, 32),
        ({"block_size": 8}, {"block_size": 4}, 256),
        ({"block_size": 4}, {"block_size": 8}, 256),
        ({"block_size": 8, "order": "hnd"}, {"block_size": 4, "order": "hnd"}, 64),
        ({"kv": "packed", "block_size": 8}, {"kv": "packed"}, 256),
    ],
)
def test_runs_are_as_long_as_both_sides_allow(
    src: dict[str, Any], dst: dict[str, Any], expected: int
) -> None:
    sides = view(**src), view(**dst)
    ids = [range(32 // side.layout.block_size) for side in sides]
    wide = [
        view(**changes, num_blocks=len(each)) for changes, each in zip((src, dst), ids, strict=True)
    ]
    assert run_bytes(plan(*wide, *ids)) == {expected}


@pytest.mark.parametrize(("order", "num_rows"), [("nhd", 4), ("hnd", 1)])
def test_a_rank_of_fewer_heads_takes_its_part_of_a_page(order: str, num_rows: int) -> None:
    # Of nhd a row for each token; of hnd two heads of all tokens lie together on both sides.
    made = plan(view(order=order), view(rank=TPLayout(2, 1), order=order), [0], [0])
    assert {box.outer_count * box.inner_count for box in made.boxes} == {num_rows}
    assert run_bytes(made) == {4 * 2 * 16 // num_rows}


def test_k_and_v_merge_only_where_every_layer_has_them_side_by_side() -> None:
    model = KVLayout(2, 1, head_dim=8, block_size=1, kv="head_packed")
    beside = KVView.dense(KVShard(model), 1, 0)
    addresses = beside.addresses.copy()
    assert run_bytes(plan(beside, beside, [0], [0])) == {32}
    addresses[1, 1] += np.uint64(64)
    apart = dataclasses.replace(beside, addresses=addresses)
    for pair in ((beside, apart), (apart, beside)):
        made = plan(*pair, [0], [0])
        assert run_bytes(made) == {16}
        assert made.num_pages == 4
        (box,) = made.boxes
        src, dst = runs(made, box)
        assert src.reshape(-1).tolist() == pair[0].addresses.T.reshape(-1).tolist()
        assert dst.reshape(-1).tolist() == pair[1].addresses.T.reshape(-1).tolist()


def test_v_in_front_of_k_does_not_merge() -> None:
    model = KVLayout(2, 1, head_dim=8, block_size=1, kv="head_packed")
    dense = KVView.dense(KVShard(model), 1, 0)
    flipped = dataclasses.replace(dense, addresses=dense.addresses[:, ::-1].copy())
    assert run_bytes(plan(flipped, flipped, [0], [0])) == {16}


def test_reads_run_upwards() -> None:
    for src, dst in (("nhd", "hnd"), ("hnd", "nhd")):
        for box in plan(view(order=src), view(order=dst), [0], [0]).boxes:
            assert box.outer_src_stride > box.inner_src_stride


# Conversion.


def test_k_and_v_do_not_merge_where_their_scales_may_differ() -> None:
    src, dst = view(kv="head_packed"), view(kv="head_packed", dtype="fp8")
    made = plan(src, dst, [0], [0], convert=ToFp8(1.0, 2.0))
    assert run_bytes(made) == {16}
    assert made.conversion == "bfloat16"
    assert made.total_bytes == dst.layout.block_bytes
    (box,) = made.boxes
    assert (box.num_planes, box.scale_plane_step) == (6, 1)
    assert made.inverse_scales.tolist() == [1.0] * 3 + [0.5] * 3


@pytest.mark.parametrize(("scale", "expected"), [(2.0, 4 * 4 * 16), (np.ones((3, 4)), 16)])
def test_heads_do_not_merge_where_each_has_its_scale(scale: Any, expected: int) -> None:
    made = plan(view(), view(dtype="fp8"), [0], [0], convert=ToFp8(scale))
    assert run_bytes(made) == {expected}


def test_a_conversion_needs_scales_of_the_model() -> None:
    with pytest.raises(InvalidUsage, match=r"k_scale has shape \(7,\)"):
        plan(view(), view(dtype="fp8"), [0], [0], convert=ToFp8(np.ones(7)))


# Tables.


def test_windows_of_one_kind_share_a_box_and_their_segments() -> None:
    slides = view(windows=(0, 4, 0))
    made = plan(slides, slides, range(8), range(8))
    assert [(box.num_planes, box.num_segments) for box in made.boxes] == [(4, 8), (2, 1)]
    assert len(made.segments) == 9
    twice = view(windows=(5, 4, 5))
    assert len(plan(twice, twice, range(8), range(8)).segments) == 1 + 2


def test_a_window_longer_than_the_request_adds_no_segments() -> None:
    slides = view(windows=(0, 4000, 0))
    made = plan(slides, slides, range(8), range(8))
    assert len(made.segments) == 8


def test_plans_share_the_tables_of_their_route_and_block_map() -> None:
    src, dst = view(), view(rank=TPLayout(2, 1))
    route, blocks = Route(src, dst), match_blocks(src, dst, [1, 2], [3, 4])
    first, second = route.plan(blocks), route.plan(blocks)
    assert first.src_planes is second.src_planes
    assert first.segments is second.segments
    other = Route(src, view(rank=TPLayout(2))).plan(blocks)
    assert other.segments is first.segments


def test_tables_cannot_be_changed_afterwards() -> None:
    slides = view(windows=(0, 4, 0))
    for side in (view(), slides):
        made = plan(side, side, [1, 2], [3, 4])
        for table in (made.src_planes, made.dst_planes, made.segments):
            with pytest.raises(ValueError, match="read-only"):
                table[0] = 9


def test_tables_grow_with_planes_plus_blocks() -> None:
    def table_bytes(num_layers: int, num_blocks: int) -> int:
        side = view(num_layers=num_layers, num_blocks=num_blocks)
        return plan(side, side, range(num_blocks), range(num_blocks)).table_bytes

    base = table_bytes(3, 8)
    assert table_bytes(3, 1008) - base == 1000 * 16
    assert table_bytes(103, 8) - base == 100 * 2 * 16
    assert table_bytes(103, 1008) - base == 100 * 2 * 16 + 1000 * 16


@pytest.mark.parametrize(
    ("src_rank", "dst_rank", "layers"),
    [
        (TPLayout(2, 0), TPLayout(2, 1), None),
        (TPLayout(pp_size=3), TPLayout(pp_size=3, pp_rank=2), None),
        (TPLayout(), TPLayout(), ()),
        (TPLayout(pp_size=3), TPLayout(), (1, 2)),
    ],
)
def test_who_has_nothing_to_send_has_a_plan_of_nothing(
    src_rank: TPLayout, dst_rank: TPLayout, layers: Any
) -> None:
    made = plan(view(rank=src_rank), view(rank=dst_rank), [0], [0], layers=layers)
    assert (made.boxes, made.num_pages, made.total_bytes) == ((), 0, 0)
    assert not carry_out(made, np.zeros(0, np.uint8)).size


def test_no_tokens_give_a_plan_of_nothing() -> None:
    for empty in ([], (), np.empty(0, np.int32)):
        made = plan(view(), view(), empty, empty)
        assert (made.num_pages, made.total_bytes, made.segments.shape) == (0, 0, (0, 4))


# 64-bit offsets.


@pytest.mark.parametrize("past", [1 << 31, 1 << 32, 1 << 33, 1 << 40])
def test_offsets_are_64_bit(past: int) -> None:
    page = 1 << 20
    layout = KVLayout(1, 8, head_dim=128, block_size=512)
    assert layout.page_bytes == page
    first, base = past // page, (1 << 47) + 12345
    src = KVView.dense(KVShard(layout), first + 3, base)
    dst = dataclasses.replace(src, block_stride_bytes=page + 256)
    ids = [first - 1, first, first + 2]
    made = plan(src, dst, ids, np.array(ids, np.uint64))
    (box,) = made.boxes
    from_, to = runs(made, box)
    assert from_[0, :, 0, 0].tolist() == [base + i * page for i in ids]
    assert to[0, :, 0, 0].tolist() == [base + i * (page + 256) for i in ids]


def test_addresses_have_64_bits() -> None:
    top = (1 << 64) - 8 * LAYOUT.block_bytes
    made = plan(view(address=top), view(), [7], [0])
    assert int(made.src_planes[-1]) == (1 << 64) - 8 * LAYOUT.page_bytes
    # The last heads of a rank that holds the second half.
    half = plan(view(address=top), view(rank=TPLayout(2, 1)), [7], [0])
    assert int(half.src_planes[-1]) == (1 << 64) - 8 * LAYOUT.page_bytes + 2 * 16


# Refusals.


def test_each_side_has_its_own_limit() -> None:
    plan(view(num_blocks=9), view(num_blocks=3), [8], [2])
    with pytest.raises(InvalidUsage, match=r"dst_block_ids\[0\] is 8; this view has 3 blocks"):
        plan(view(num_blocks=9), view(num_blocks=3), [2], [8])
    with pytest.raises(InvalidUsage, match=r"src_block_ids\[1\] is 3; this view has 3 blocks"):
        plan(view(num_blocks=3), view(num_blocks=9), [2, 3], [8, 1])


def test_the_wrong_ids_are_named() -> None:
    with pytest.raises(InvalidUsage, match=r"src_block_ids\[1\] is -1"):
        plan(view(), view(), [0, -1], [0, 1])
    with pytest.raises(InvalidUsage, match=r"dst_block_ids\[0\] and dst_block_ids\[2\] are both 5"):
        plan(view(), view(), [0, 1, 2], [5, 0, 5])


def test_a_source_may_be_read_twice() -> None:
    made = plan(view(), view(), [3, 3], [0, 1])
    assert made.segments[:, :2].tolist() == [[3, 0], [3, 1]]


def test_tables_may_begin_at_different_tokens() -> None:
    made = plan(view(), view(), BlockTable([5], 4), [1, 2], tokens=range(4, 8))
    assert made.segments.tolist() == [[5, 2, 0, 0]]


def test_layouts_are_compared_before_the_blocks() -> None:
    with pytest.raises(LayoutMismatch, match="head_dim is 8 at the source and 4"):
        plan(view(), view(head_dim=4), [99], [99])


@pytest.mark.parametrize("layers", [[3], (0, -1), {1, 7}, [1.5], ["0"]])
def test_layers_that_the_model_lacks_are_refused(layers: Any) -> None:
    with pytest.raises(InvalidUsage, match=r"layers is .*; use an integer of 0 \.\. 2"):
        Route(view(), view(), layers=layers)


def test_blocks_matched_for_other_caches_are_refused() -> None:
    route = Route(view(), view(block_size=8))
    with pytest.raises(InvalidUsage, match="blocks of 4 and 4 tokens, the caches have 4 and 8"):
        route.plan(BlockMap([0], [0], src_block_size=4, dst_block_size=4))
    many = BlockMap([0, 9], [0], src_block_size=4, dst_block_size=8)
    with pytest.raises(InvalidUsage, match=r"src_block_ids\[1\] is 9; this view has 8 blocks"):
        route.plan(many)
