"""plan(): against a brute force that walks pages with Python ints over a model of memory."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidUsage, LayoutMismatch
from kvxfer.layout import CopyPlan, KVLayout, KVView, plan

LAYOUT = KVLayout(2, 1, head_dim=2, dtype="int8", block_size=2)
PAGE = 4
PLANES = 4


def view(
    *,
    num_blocks: int = 8,
    stride: int = PAGE,
    layout: KVLayout = LAYOUT,
    addresses: list[int] | None = None,
) -> KVView:
    if addresses is None:
        addresses = [index * num_blocks * stride for index in range(layout.num_planes)]
    return KVView(
        layout,
        num_blocks,
        plane_addresses=np.array(addresses, dtype=np.uint64),
        block_stride_bytes=stride,
    )


def carry_out(copy: CopyPlan, memory: bytearray) -> bytearray:
    """Do what a transport does: one page for every plane and offset; all reads come first."""
    after = bytearray(memory)
    for src_plane, dst_plane in zip(copy.src_planes, copy.dst_planes, strict=True):
        for src_offset, dst_offset in zip(copy.src_offsets, copy.dst_offsets, strict=True):
            src, dst = int(src_plane) + int(src_offset), int(dst_plane) + int(dst_offset)
            after[dst : dst + copy.page_bytes] = memory[src : src + copy.page_bytes]
    return after


# The oracle.


@dataclasses.dataclass(frozen=True)
class Case:
    memory: bytearray
    src: KVView
    dst: KVView
    src_ids: list[int]
    dst_ids: list[int]
    expected: bytearray


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims = st.integers(1, 3)
    kv = draw(st.sampled_from(["split", "packed", "mla"]))
    layers, block, dim = draw(dims), draw(dims), draw(dims)
    heads = 1 if kv == "mla" else draw(dims)
    layout = KVLayout(layers, heads, head_dim=dim, dtype="bf16", block_size=block, kv=kv)
    # Sizes worked out here, not taken from the layout.
    planes = layers * (2 if kv == "split" else 1)
    page = 2 * block * heads * dim * (2 if kv == "packed" else 1)
    num_ids = draw(st.integers(0, 5))
    sides, at = [], 0
    for _ in range(2):
        num_blocks = draw(st.integers(max(1, num_ids), 7))
        stride = page + draw(st.integers(0, 5))
        starts = []
        for _ in range(planes):
            at += draw(st.integers(0, 3))
            starts.append(at)
            at += num_blocks * stride
        sides.append((num_blocks, stride, draw(st.permutations(starts))))
    (src_blocks, src_stride, src_starts), (dst_blocks, dst_stride, dst_starts) = sides
    any_id = st.integers(0, src_blocks - 1)
    src_ids = draw(st.lists(any_id, min_size=num_ids, max_size=num_ids))
    dst_ids = draw(st.permutations(range(dst_blocks)))[:num_ids]
    memory = bytearray(np.random.default_rng(at).integers(0, 256, at, dtype=np.uint8).tobytes())
    expected = bytearray(memory)
    for p in range(planes):
        for src_id, dst_id in zip(src_ids, dst_ids, strict=True):
            for byte in range(page):
                source = src_starts[p] + src_id * src_stride + byte
                expected[dst_starts[p] + dst_id * dst_stride + byte] = memory[source]
    return Case(
        memory,
        view(layout=layout, num_blocks=src_blocks, stride=src_stride, addresses=src_starts),
        view(layout=layout, num_blocks=dst_blocks, stride=dst_stride, addresses=dst_starts),
        src_ids,
        dst_ids,
        expected,
    )


@given(cases())
def test_plan_moves_what_the_brute_force_moves(case: Case) -> None:
    copy = plan(case.src, case.dst, case.src_ids, case.dst_ids)
    assert carry_out(copy, case.memory) == case.expected
    num_planes = case.src.layout.num_planes
    assert copy.num_pages == num_planes * len(case.src_ids)
    assert copy.total_bytes == copy.num_pages * case.src.layout.page_bytes
    assert copy.table_bytes == 8 * 2 * (num_planes + len(case.src_ids))


def test_the_oracle_sees_two_swapped_blocks() -> None:
    memory = bytearray(range(2 * PLANES * 8 * PAGE % 256 or 256))
    src, dst = view(), view(addresses=[128 + 32 * index for index in range(PLANES)])
    right = carry_out(plan(src, dst, [1, 2], [3, 4]), memory)
    wrong = carry_out(plan(src, dst, [2, 1], [3, 4]), memory)
    assert right != wrong


# 64-bit offsets.


@pytest.mark.parametrize("past", [1 << 31, 1 << 32, 1 << 33, 1 << 40])
@pytest.mark.parametrize("id_type", [list, np.int32, np.int64, np.uint32, np.uint64])
def test_offsets_are_64_bit(past: int, id_type: type) -> None:
    page = 1 << 20
    layout = KVLayout(1, 8, head_dim=128, block_size=512)
    assert layout.page_bytes == page
    first = past // page
    base = (1 << 47) + 12345
    src = view(layout=layout, num_blocks=first + 3, stride=page, addresses=[base, 2 * base])
    dst = view(layout=layout, num_blocks=first + 3, stride=page + 256, addresses=[0, base])
    ids = [first - 1, first, first + 2]
    given_ids = ids if id_type is list else np.array(ids, dtype=id_type)
    copy = plan(src, dst, given_ids, given_ids)
    assert copy.src_offsets.tolist() == [i * page for i in ids]
    assert copy.dst_offsets.tolist() == [i * (page + 256) for i in ids]


def test_the_last_page_may_end_at_the_end_of_the_address_space() -> None:
    addresses = [0, 1, 2, (1 << 64) - 8 * PAGE]
    copy = plan(view(addresses=addresses), view(), [7], [0])
    assert int(copy.src_planes[3]) + int(copy.src_offsets[0]) + PAGE == 1 << 64


# Block ids.


def test_empty_lists_give_a_plan_of_no_pages() -> None:
    for empty in ([], (), np.empty(0, np.int32)):
        copy = plan(view(), view(), empty, empty)
        assert (copy.num_pages, copy.total_bytes) == (0, 0)
        assert copy.table_bytes == 8 * 2 * PLANES


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), range(1, 3), np.array([1, 9, 2])[::2], b"\1\2"])
def test_kinds_of_sequences(ids: object) -> None:
    if isinstance(ids, bytes):
        with pytest.raises(InvalidUsage, match="src_block_ids has shape"):
            plan(view(), view(), ids, [0, 1])
        return
    assert plan(view(), view(), ids, [0, 1]).src_offsets.tolist() == [PAGE, 2 * PAGE]  # type: ignore[arg-type]


def test_a_source_may_be_read_twice() -> None:
    assert plan(view(), view(), [3, 3], [0, 1]).src_offsets.tolist() == [12, 12]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1, 8], r"\[2\] is 8; this view has 8 blocks, so use 0 \.\. 7"),
        ([0, -1, 9], r"\[1\] is -1"),
        (np.array([0, -1], np.int8), r"\[1\] is -1"),
        (np.array([1 << 63], np.uint64), rf"\[0\] is {1 << 63}"),
        ([1 << 63], rf"\[0\] is {1 << 63} \(int\); use integers of at most 64 bits"),
        ([0, 1.0], r"\[1\] is 1\.0 \(float\)"),
        ([2, True], r"\[1\] is True \(bool\)"),
        ([2, np.False_], r"\[1\] is .*False.* \(bool"),
        ([2, None], r"\[1\] is None"),
        ([[0, 1]], r"\[0\] is \[0, 1\] \(list\)"),
        (np.array([0.0]), "has dtype float64"),
        (np.empty(0), "has dtype float64"),
        (np.array([True]), "has dtype bool"),
        (np.array([[0]]), r"has shape \(1, 1\)"),
        (np.array(0), r"has shape \(\)"),
        (np.array([0], dtype=object), "has dtype object"),
        ("01", r"has shape \(\)"),
        (3, r"has shape \(\)"),
        (None, r"has shape \(\)"),
    ],
)
@pytest.mark.parametrize("side", ["src_block_ids", "dst_block_ids"])
def test_bad_ids_are_refused(ids: object, message: str, side: str) -> None:
    other = [*range(len(ids))] if hasattr(ids, "__len__") and np.ndim(ids) else [0]
    pair = (ids, other) if side == "src_block_ids" else (other, ids)
    with pytest.raises(InvalidUsage, match=f"{side}{' ' if message[0] == 'h' else ''}{message}"):
        plan(view(), view(), *pair)  # type: ignore[arg-type]


def test_each_side_has_its_own_limit() -> None:
    plan(view(num_blocks=9), view(num_blocks=3), [8], [2])
    with pytest.raises(InvalidUsage, match=r"dst_block_ids\[0\] is 8; this view has 3 blocks"):
        plan(view(num_blocks=9), view(num_blocks=3), [2], [8])


def test_lengths_must_agree() -> None:
    with pytest.raises(InvalidUsage, match="src_block_ids has 2 entries and dst_block_ids 1"):
        plan(view(), view(), [1, 2], [1])


@pytest.mark.parametrize("num_blocks", [8, 1 << 20, (1 << 32) - 1])
def test_a_destination_named_twice_is_refused(num_blocks: int) -> None:
    # One span of ids for each way of looking for duplicates.
    many = view(num_blocks=num_blocks, addresses=[0] * PLANES)
    ids = [num_blocks - 1, 5, 0, 5, num_blocks - 1]
    message = r"dst_block_ids\[1\] and dst_block_ids\[3\] are both 5"
    with pytest.raises(InvalidUsage, match=message):
        plan(many, many, ids, ids)
    assert plan(many, many, ids[:3], ids[:3]).num_pages == 3 * PLANES


@given(st.lists(st.integers(0, 7), max_size=8) | st.lists(st.integers(0, (1 << 32) - 2)))
def test_duplicates_are_found_exactly(ids: list[int]) -> None:
    many = view(num_blocks=(1 << 32) - 1, addresses=[0] * PLANES)
    if len(set(ids)) == len(ids):
        assert plan(many, many, ids, ids).dst_offsets.tolist() == [PAGE * i for i in ids]
    else:
        with pytest.raises(InvalidUsage, match="are both"):
            plan(many, many, ids, ids)


# Layouts, views and tables.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "num_layers is 2 at the source and 3 at the destination"),
        ({"num_kv_heads": 2}, "num_kv_heads is 1 at the source and 2"),
        ({"head_dim": 4}, "head_dim is 2 at the source and 4"),
        ({"dtype": "uint8"}, "dtype is int8 at the source and uint8"),
        ({"block_size": 1}, "block_size is 2 at the source and 1"),
        ({"order": "hnd"}, "order is nhd at the source and hnd"),
        ({"kv": "packed"}, "kv is split at the source and packed"),
        ({"head_dim": 1, "block_size": 4}, "head_dim is 2"),
    ],
)
def test_unequal_layouts_are_refused(changes: dict[str, object], message: str) -> None:
    other = view(layout=dataclasses.replace(LAYOUT, **changes), stride=64)
    with pytest.raises(LayoutMismatch, match=message):
        plan(view(), other, [0], [0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_blocks": 1 << 32}, "num_blocks is 4294967296"),
        ({"block_stride_bytes": PAGE - 1}, r"block_stride_bytes is 3; use an integer of 4 \.\."),
        ({"block_stride_bytes": 1 << 64}, "block_stride_bytes is 18446744073709551616"),
        ({"plane_addresses": [0] * PLANES}, "plane_addresses is list; use a numpy array of uint64"),
        ({"plane_addresses": np.zeros(PLANES, np.int64)}, "plane_addresses is int64"),
        ({"plane_addresses": np.zeros(PLANES, ">u8")}, "plane_addresses is >u8"),
        ({"plane_addresses": np.zeros(3, np.uint64)}, r"has shape \(3,\); the layout has 4 planes"),
        ({"plane_addresses": np.zeros((4, 1), np.uint64)}, r"has shape \(4, 1\)"),
    ],
)
def test_wrong_views_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        dataclasses.replace(view(), **changes)


def test_a_plane_past_the_end_of_the_address_space_is_refused() -> None:
    addresses = [0, (1 << 64) - 8 * PAGE + 1, 0, 0]
    with pytest.raises(InvalidUsage, match="plane 1 at 0xffffffffffffffe1 spans 32 bytes"):
        view(addresses=addresses)
    with pytest.raises(InvalidUsage, match="passes the end"):
        view(num_blocks=1 << 31, stride=1 << 34, addresses=[0] * PLANES)


def test_plane_span_ends_with_the_last_page() -> None:
    assert view(num_blocks=3, stride=10).plane_span_bytes == 24


def test_what_was_checked_cannot_be_changed_afterwards() -> None:
    addresses = np.arange(PLANES, dtype=np.uint64)
    checked = dataclasses.replace(view(), plane_addresses=addresses)
    addresses[:] = 1 << 63
    assert checked.plane_addresses.tolist() == [0, 1, 2, 3]
    ids = np.array([1, 2])
    copy = plan(checked, checked, ids, ids)
    ids[:] = 7
    assert copy.src_offsets.tolist() == [PAGE, 2 * PAGE]
    for table in (copy.src_planes, copy.dst_planes, copy.src_offsets, copy.dst_offsets):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src_planes": np.zeros(3, np.uint64)}, "src_planes has 3 entries and dst_planes 4"),
        ({"dst_offsets": np.zeros(1, np.uint64)}, "src_offsets has 2 entries and dst_offsets 1"),
        ({"src_offsets": np.zeros(2, np.int64)}, "src_offsets is int64"),
        ({"src_offsets": np.zeros(4, np.uint64)[::2]}, "use a contiguous uint64 array"),
        ({"dst_planes": [0]}, "dst_planes is list"),
        ({"page_bytes": 0}, "page_bytes is 0"),
    ],
)
def test_wrong_tables_are_refused(changes: dict[str, object], message: str) -> None:
    good = plan(view(), view(), [1, 2], [3, 4])
    with pytest.raises(InvalidUsage, match=message):
        dataclasses.replace(good, **changes)
