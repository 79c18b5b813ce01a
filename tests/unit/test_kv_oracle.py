"""The oracle of resharding, by hand, and seen to fail: test_reshard.py and others stand on it."""

import dataclasses

import numpy as np
import pytest
from kv_oracle import (
    DST_FILLER,
    SRC_FILLER,
    Blocks,
    RankCache,
    codes,
    compare,
    heads_of,
    moved_tokens,
    stage_layers,
)
from reshard_cases import Case, Model, Side

# Two layers, K and V, one head of one element: as small as a cache that shows its axes can be.
SMALL = RankCache("split", "nhd", range(2), range(1), 2, 1, 2, 2)
BLOCKS = Blocks((1, 0), 0, 2)
EVERY_TOKEN = {0: range(4), 1: range(4)}

MODEL = Model(2, 2, 2)
SRC = Side(MODEL, "bfloat16", 1, 1, "split", "nhd", 2, 3, (2, 0))
DST = Side(MODEL, "bfloat16", 2, 1, "packed", "hnd", 4, 2, (1,))
CASE = Case(MODEL, SRC, DST, range(1, 4))


def filled(cache: RankCache) -> list[int]:
    """The elements of a cache, as they lie, where codes are 1 .. 16: layer, K|V, token."""
    memory = cache.fresh(0)
    cache.write(memory, codes(2, 2, 4, 1, 1), BLOCKS, EVERY_TOKEN)
    found: list[int] = memory.view(np.uint16).tolist()
    return found


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("split", [3, 4, 1, 2, 7, 8, 5, 6, 11, 12, 9, 10, 15, 16, 13, 14]),
        ("packed", [3, 4, 7, 8, 1, 2, 5, 6, 11, 12, 15, 16, 9, 10, 13, 14]),
        ("head_packed", [3, 7, 4, 8, 1, 5, 2, 6, 11, 15, 12, 16, 9, 13, 10, 14]),
        ("chunked", [3, 4, 11, 12, 7, 8, 15, 16, 1, 2, 9, 10, 5, 6, 13, 14]),
    ],
)
def test_kinds_by_hand(kind: str, expected: list[int]) -> None:
    # Codes 1 .. 4 are K of layer 0, 5 .. 8 its V; block 1 comes first in the request.
    assert filled(dataclasses.replace(SMALL, kind=kind)) == expected


@pytest.mark.parametrize(("order", "expected"), [("nhd", [1, 2, 3, 4]), ("hnd", [1, 3, 2, 4])])
def test_orders_by_hand(order: str, expected: list[int]) -> None:
    cache = RankCache("mla", order, range(1), range(2), 2, 1, 1, 2)
    memory = cache.fresh(0)
    cache.write(memory, codes(1, 1, 2, 2, 1), Blocks((0,), 0, 2), {0: range(2)})
    assert memory.view(np.uint16).tolist() == expected


def test_gaps_lie_behind_their_axis() -> None:
    padded = dataclasses.replace(SMALL, gaps=(0, 0, 1, 0, 0, 1))
    # Each element of 2 bytes is followed by as many, and two blocks by the room of a third.
    assert padded.num_bytes == 2 * 2 * 3 * 2 * 2 * 2
    assert filled(padded)[:12] == [3, 0, 4, 0, 1, 0, 2, 0, 0, 0, 0, 0]
    assert [padded.stride_bytes(axis) for axis in "bth"] == [8, 4, 4]
    assert padded.addresses(100).tolist() == [[100, 124], [148, 172]]


def test_shuffled_planes_hold_the_same_elements() -> None:
    shuffled = dataclasses.replace(SMALL, plane_seed=2)
    assert filled(shuffled) != filled(SMALL)
    assert sorted(filled(shuffled)) == sorted(filled(SMALL))
    assert sorted(shuffled.addresses(0).reshape(-1)) == sorted(SMALL.addresses(0).reshape(-1))


def test_heads_and_layers_by_hand() -> None:
    assert [heads_of(rank, 3, 8) for rank in range(3)] == [range(3), range(2, 6), range(5, 8)]
    assert [heads_of(rank, 4, 2) for rank in range(4)] == [range(1)] * 2 + [range(1, 2)] * 2
    assert stage_layers(5, 3) == [range(2), range(2, 4), range(4, 5)]
    assert stage_layers(5, (1, 5)) == [range(1), range(1, 5)]


def test_moved_tokens_by_hand() -> None:
    assert moved_tokens(range(2, 8), (), [0, 1]) == {0: range(2, 8), 1: range(2, 8)}
    assert moved_tokens(range(2, 8), (0, 3), [0, 1]) == {0: range(2, 8), 1: range(5, 8)}
    assert moved_tokens(range(2, 8), (99,), [0]) == {0: range(2, 8)}
    assert moved_tokens(range(2, 2), (3,), [0]) == {0: range(0)}


def test_codes_are_distinct_and_bounded() -> None:
    made = codes(2, 2, 3, 4, 5)
    assert len(np.unique(made)) == made.size
    assert made.min() > 0
    with pytest.raises(AssertionError, match="too large for codes"):
        codes(64, 2, 64, 8, 1)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (0, "layer 0, K, block 0, slot 0, head 0, element 0"),
        (9, "layer 0, V, block 0, slot 0, head 0, element 0"),
        (31, "layer 1, V, block 1, slot 1, head 0, element 0"),
    ],
)
def test_one_wrong_byte_is_found_and_named(place: int, message: str) -> None:
    expected = SMALL.fresh(SRC_FILLER)
    compare(SMALL, expected.copy(), expected)
    actual = expected.copy()
    actual[place] ^= 1
    with pytest.raises(AssertionError, match=message):
        compare(SMALL, actual, expected)


def test_a_written_gap_is_found() -> None:
    padded = dataclasses.replace(SMALL, gaps=(0, 0, 0, 0, 0, 1))
    actual = padded.fresh(DST_FILLER)
    actual[3] ^= 1
    with pytest.raises(AssertionError, match=r"a gap \(byte 3\): is 0xef, should be 0xee"):
        compare(padded, actual, padded.fresh(DST_FILLER))


# Cases.


def test_a_case_by_hand() -> None:
    source = SRC.caches[0].elements, CASE.source_bytes(0).view(np.uint16)
    for rank in DST.ranks:
        places = DST.caches[rank].elements
        after = CASE.expected_bytes(rank).view(np.uint16)
        for token, (src_block, src_slot) in {1: (2, 1), 2: (0, 0), 3: (0, 1)}.items():
            moved = after[places[:, :, 1, token, 0]]
            assert np.array_equal(moved, source[1][source[0][:, :, src_block, src_slot, rank]])
        untouched = [places[:, :, 0].reshape(-1), places[:, :, 1, 0].reshape(-1)]
        assert (after[np.concatenate(untouched)] == DST_FILLER).all()


def test_expected_writes_are_what_differs() -> None:
    for rank in DST.ranks:
        differs = CASE.expected_bytes(rank) != CASE.destination_bytes(rank)
        writes = CASE.expected_writes(rank)
        assert writes.sum() == 2 * 2 * 3 * 2 * 2
        assert not (differs & ~writes).any()


def test_layers_and_windows_narrow_what_moves() -> None:
    windowed = dataclasses.replace(MODEL, windows=(0, 1))
    sides = (dataclasses.replace(side, model=windowed) for side in (SRC, DST))
    narrow = Case(windowed, *sides, range(1, 4), layers=(1,))
    assert narrow.expected_writes(0).sum() == 1 * 2 * 1 * 2 * 2


@pytest.mark.parametrize("scales", ["one", "layer", "head"])
def test_a_converted_case_has_one_byte_an_element(scales: str) -> None:
    narrow = dataclasses.replace(DST, dtype="fp8_e4m3")
    case = dataclasses.replace(CASE, dst=narrow, scales=scales)
    assert case.conversion is not None
    assert case.conversion.per_head == (scales == "head")
    assert case.expected_writes(0).sum() == CASE.expected_writes(0).sum() // 2
    written = case.expected_bytes(0)[case.expected_writes(0)]
    assert len(np.unique(written)) > written.size // 3
