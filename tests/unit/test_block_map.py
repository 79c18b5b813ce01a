"""BlockMap: every token's place on both sides, against a list made token by token."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_oracle import Blocks

from kvxfer.errors import InvalidUsage
from kvxfer.layout import BlockMap, BlockTable

MAX_BLOCK = (1 << 32) - 2
Place = tuple[int, int, int, int]


def match(src: object, dst: object, sizes: tuple[int, int] = (2, 2), **more: object) -> BlockMap:
    return BlockMap(src, dst, src_block_size=sizes[0], dst_block_size=sizes[1], **more)  # type: ignore[arg-type]


def places(blocks: BlockMap, tokens: range | None = None) -> list[Place]:
    """(src block, dst block, src slot, dst slot) of every token that the segments name."""
    found = []
    for segments in blocks.segments(blocks.tokens if tokens is None else tokens):
        assert segments.num_tokens > 0
        for src, dst, src_slot, dst_slot in segments.table.tolist():
            found += [(src, dst, src_slot + i, dst_slot + i) for i in range(segments.num_tokens)]
    return found


@st.composite
def tables(draw: st.DrawFn, tokens: range, first_limit: int) -> Blocks:
    size = draw(st.sampled_from((1, 2, 3, 4, 6, 8, 16)))
    first = tokens.start - draw(st.integers(0, min(tokens.start, first_limit)))
    needed = -(-(tokens.stop - first) // size) + draw(st.integers(0, 1))
    ids = draw(st.lists(st.integers(0, MAX_BLOCK), min_size=needed, max_size=needed, unique=True))
    return Blocks(tuple(ids), first, size)


@st.composite
def requests(draw: st.DrawFn) -> tuple[range, Blocks, Blocks]:
    start = draw(st.integers(0, 40) | st.integers(1 << 31, 1 << 34))
    tokens = range(start, start + draw(st.integers(0, 60)))
    return tokens, draw(tables(tokens, 40)), draw(tables(tokens, 40))


@given(requests(), st.data())
def test_segments_name_every_token_once(
    request: tuple[range, Blocks, Blocks], data: st.DataObject
) -> None:
    tokens, src, dst = request
    blocks = match(
        BlockTable(src.ids, src.first_token),
        BlockTable(dst.ids, dst.first_token),
        (src.block_size, dst.block_size),
        tokens=tokens,
    )
    part = blocks.last_tokens(data.draw(st.integers(0, 70)))
    expected = []
    for token in part:
        (src_block, src_slot), (dst_block, dst_slot) = src.place(token), dst.place(token)
        expected.append((src_block, dst_block, src_slot, dst_slot))
    assert sorted(places(blocks, part)) == sorted(expected)
    lengths = [segments.num_tokens for segments in blocks.segments(part)]
    assert lengths == sorted(set(lengths), reverse=True)


@pytest.mark.parametrize(
    ("sizes", "num_blocks", "lengths"),
    [
        ((16, 16), (6, 6), {16: 6}),
        ((16, 64), (12, 3), {16: 12}),
        ((64, 16), (3, 12), {16: 12}),
        ((48, 32), (2, 3), {32: 2, 16: 2}),
        ((3, 5), (5, 3), {3: 3, 2: 2, 1: 2}),
    ],
)
def test_tables_are_cut_where_either_block_ends(
    sizes: tuple[int, int], num_blocks: tuple[int, int], lengths: dict[int, int]
) -> None:
    blocks = match(range(num_blocks[0]), range(num_blocks[1]), sizes)
    found = blocks.segments(blocks.tokens)
    assert {segments.num_tokens: len(segments.table) for segments in found} == lengths
    assert all(segments.table.dtype == np.uint32 for segments in found)


def test_a_prefix_and_a_partial_last_block_by_hand() -> None:
    # Tokens 0 1 | 2 3 | 4 5 in blocks 7, 8, 9; tokens 0 1 2 3 | 4 5 6 7 in blocks 4, 5.
    blocks = match([7, 8, 9], [4, 5], (2, 4), tokens=range(1, 5))
    assert sorted(places(blocks)) == [(7, 4, 1, 1), (8, 4, 0, 2), (8, 4, 1, 3), (9, 5, 0, 0)]


def test_a_table_may_begin_late() -> None:
    blocks = match(BlockTable([7, 8], 4), [1, 2, 3, 4], tokens=range(5, 8))
    assert sorted(places(blocks)) == [(7, 3, 1, 1), (8, 4, 0, 0), (8, 4, 1, 1)]
    same = match(BlockTable([7, 8], 4), BlockTable([5, 6], 4))
    assert same.tokens == range(4, 8)
    assert sorted(places(same))[0] == (7, 5, 0, 0)


@pytest.mark.parametrize(
    ("window", "tokens"),
    [(0, range(2, 8)), (1, range(7, 8)), (5, range(3, 8)), (6, range(2, 8)), (99, range(2, 8))],
)
def test_a_window_counts_back_from_the_last_token(window: int, tokens: range) -> None:
    assert match(range(4), range(4), tokens=range(2, 8)).last_tokens(window) == tokens


def test_a_window_of_no_tokens_is_empty() -> None:
    blocks = match(range(4), range(4), tokens=range(3, 3))
    assert not blocks.last_tokens(2)
    assert not blocks.segments(blocks.last_tokens(2))


def test_segments_are_made_once_and_cannot_be_written() -> None:
    for sizes in ((2, 2), (1, 2)):
        blocks = match(range(4), range(4 * sizes[0] // sizes[1]), sizes)
        (found,) = blocks.segments(blocks.tokens)
        assert blocks.segments(blocks.tokens)[0] is found
        with pytest.raises(ValueError, match="read-only"):
            found.table[0] = 9


# Ids.


@pytest.mark.parametrize("empty", [[], (), np.empty(0, np.int32), range(0)])
def test_empty_tables_hold_no_tokens(empty: object) -> None:
    blocks = match(empty, empty)
    assert (blocks.tokens, places(blocks)) == (range(0, 0), [])


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        lambda ids: np.array(ids)[::-1][::-1],
        *(lambda ids, dtype=dtype: np.array(ids, dtype) for dtype in "bBhHiIqQ"),
    ],
)
def test_ids_of_all_integer_types(kind: Callable[[list[int]], object]) -> None:
    blocks = match(kind([1, 120]), kind([0, 5]), (1, 1))
    assert places(blocks) == [(1, 0, 0, 0), (120, 5, 0, 0)]


def test_ids_are_copied() -> None:
    ids = np.array([1, 2], np.uint64)
    blocks = match(ids, ids, (1, 1))
    ids[:] = 7
    assert places(blocks) == [(1, 1, 0, 0), (2, 2, 0, 0)]


def test_ids_above_31_bits() -> None:
    ids = [1 << 31, MAX_BLOCK]
    assert places(match(ids, ids, (1, 1))) == [(i, i, 0, 0) for i in ids]


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
        (np.array([0.0]), " has dtype float64"),
        (np.empty(0), " has dtype float64"),
        (np.array([True]), " has dtype bool"),
        (np.array([[0]]), r" has shape \(1, 1\)"),
        (np.array(0), r" has shape \(\)"),
        (np.array([0], dtype=object), " has dtype object"),
        (b"\1\2", r" has shape \(\)"),
        ("01", r" has shape \(\)"),
        (3, r" has shape \(\)"),
        (None, r" has shape \(\)"),
    ],
)
@pytest.mark.parametrize("side", ["src_block_ids", "dst_block_ids"])
def test_bad_ids_are_refused(ids: object, message: str, side: str) -> None:
    other = [*range(len(ids))] if hasattr(ids, "__len__") and np.ndim(ids) else [0]  # type: ignore[arg-type]
    pair = (ids, other) if side == "src_block_ids" else (other, ids)
    with pytest.raises(InvalidUsage, match=side + message):
        match(*pair, src_num_blocks=8, dst_num_blocks=8)


@pytest.mark.parametrize("num_blocks", [8, 1 << 20, (1 << 32) - 1])
def test_a_destination_named_twice_is_refused(num_blocks: int) -> None:
    # One span of ids for each way of looking for duplicates.
    ids = [num_blocks - 1, 5, 0, 5, num_blocks - 1]
    message = r"dst_block_ids\[1\] and dst_block_ids\[3\] are both 5"
    with pytest.raises(InvalidUsage, match=message):
        match(ids, ids)
    assert len(places(match(ids, range(5)))) == 10


@given(st.lists(st.integers(0, 7), max_size=8) | st.lists(st.integers(0, MAX_BLOCK)))
def test_duplicates_are_found_exactly(ids: list[int]) -> None:
    if len(set(ids)) == len(ids):
        assert [place[1] for place in places(match(ids, ids, (1, 1)))] == ids
    else:
        with pytest.raises(InvalidUsage, match="are both"):
            match(ids, ids)


def test_a_block_named_twice_matters_only_where_it_is_written() -> None:
    # Engines pad tables with one block behind the request's end.
    padded = [3, 4, 0, 0]
    assert len(places(match([1, 2], padded, tokens=range(4)))) == 4
    with pytest.raises(InvalidUsage, match="are both 0"):
        match(range(4), padded, tokens=range(7))


# Tokens.


@pytest.mark.parametrize(
    ("src", "dst", "tokens", "message"),
    [
        (
            [1, 2],
            [1],
            None,
            "the source's 2 blocks hold tokens 0 to 3, the destination's 1 tokens 0",
        ),
        ([], [1], None, "0 blocks hold no tokens"),
        (BlockTable([1], 2), [1], None, r"tokens 2 to 3, .* say which to move with tokens=range"),
        (
            [1, 2],
            [1],
            range(4),
            "dst_block_ids hold tokens 0 to 1, which does not cover tokens 0 to 3",
        ),
        ([1], [1, 2], range(1, 3), "src_block_ids hold tokens 0 to 1, which does not cover"),
        (BlockTable([1], 2), [1, 2], range(1, 3), "src_block_ids hold tokens 2 to 3"),
        ([1, 2], [1, 2], range(0, 4, 2), r"tokens is range\(0, 4, 2\); use a range of step 1"),
        ([1, 2], [1, 2], (0, 4), r"tokens is \(0, 4\); use a range of step 1"),
        ([1, 2], [1, 2], range(-1, 3), "src_block_ids hold tokens 0 to 3"),
    ],
)
def test_tokens_that_a_table_does_not_hold_are_refused(
    src: object, dst: object, tokens: object, message: str
) -> None:
    with pytest.raises(InvalidUsage, match=message):
        match(src, dst, tokens=tokens)


def test_no_tokens_need_no_blocks() -> None:
    assert places(match([], [3, 3], tokens=range(5, 5))) == []


@pytest.mark.parametrize("first_token", [-1, 1.0, True, 1 << 41])
def test_wrong_first_tokens_are_refused(first_token: object) -> None:
    with pytest.raises(InvalidUsage, match="first_token is"):
        BlockTable([1], first_token)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["src_block_size", "dst_block_size"])
def test_wrong_block_sizes_are_refused(field: str) -> None:
    sizes = {"src_block_size": 1, "dst_block_size": 1} | {field: 0}
    with pytest.raises(InvalidUsage, match=f"{field} is 0"):
        BlockMap([1], [1], **sizes)


def test_caches_of_other_sizes_are_checked_again() -> None:
    blocks = match([1, 7], [2, 3])
    blocks.require_within(8, 4)
    with pytest.raises(InvalidUsage, match=r"src_block_ids\[1\] is 7; this view has 7 blocks"):
        blocks.require_within(7, 4)
    with pytest.raises(InvalidUsage, match=r"dst_block_ids\[1\] is 3; this view has 3 blocks"):
        blocks.require_within(8, 3)
