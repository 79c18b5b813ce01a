"""The core's test pattern, against the same arithmetic in numpy, and what its check detects."""

import numpy as np
import pytest
from arena import Arena, make_arena, sparse_memory
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pattern_oracle import pattern, vector

from kvxfer import _core

GIB = 1 << 30
MASK = (1 << 64) - 1
SEED = 20_260_101
NO_PAGE = MASK
PLANE_KEYS = [0, 1 << 48, 2 << 48]
# A page is 4 tokens of 2 heads each, in that order, of vectors of 32 bytes.
TOKENS, HEADS, FIRST_HEAD = 4, 2, 3
VECTOR_BYTES = 32
PAGE_BYTES = TOKENS * HEADS * VECTOR_BYTES
PAGE_WORDS = PAGE_BYTES // 8

Bytes = NDArray[np.uint8]


def page(seed: int, plane_key: int, first_token: int, vector_bytes: int = VECTOR_BYTES) -> Bytes:
    """The vectors of a page of an arena."""
    vectors = [
        vector(seed, plane_key, first_token + token, FIRST_HEAD + head, vector_bytes)
        for token in range(TOKENS)
        for head in range(HEADS)
    ]
    return np.concatenate(vectors)


def tables(
    arena: Arena, plane_keys: list[int] | None = None, token_keys: list[int] | None = None
) -> _core.PatternTables:
    plane_keys = PLANE_KEYS[: len(arena.plane_offsets)] if plane_keys is None else plane_keys
    num_blocks = len(arena.block_offsets)
    keys = [TOKENS * block for block in range(num_blocks)] if token_keys is None else token_keys
    vector_bytes = arena.page_bytes // (TOKENS * HEADS)
    return _core.PatternTables(
        arena.planes,
        np.array(plane_keys, np.uint64),
        arena.offsets,
        np.array(keys, np.uint64),
        np.full(num_blocks, TOKENS, np.uint32),
        token_stride=HEADS * vector_bytes,
        head_stride=vector_bytes,
        num_heads=HEADS,
        first_head=FIRST_HEAD,
        vector_bytes=vector_bytes,
    )


def fill(arena: Arena, *, seed: int = SEED, num_threads: int = 2) -> None:
    _core.pattern_fill_host(_core.WorkerPool(num_threads), tables(arena), seed)


def find(arena: Arena, *, seed: int = SEED, num_threads: int = 2) -> tuple[int, int]:
    """(wrong words, first wrong page) of a check."""
    found = _core.pattern_check_host(_core.WorkerPool(num_threads), tables(arena), seed)
    return found.num_wrong_words, found.first_page


@pytest.fixture
def filled() -> Arena:
    """3 planes x 5 blocks; page ``5 * plane + block`` of the check."""
    arena = make_arena(3, 5, PAGE_BYTES, seed=1)
    fill(arena)
    return arena


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("vector_bytes", [2, 6, 8, 10, 64, 72, 78, 4096])
def test_the_fill_is_the_pattern_and_nothing_else(vector_bytes: int, num_threads: int) -> None:
    page_bytes = TOKENS * HEADS * vector_bytes
    arena = make_arena(3, 5, page_bytes, seed=1)
    expected = Arena(arena.memory.copy(), arena.plane_offsets, arena.block_offsets, page_bytes)
    for plane in range(3):
        for block in range(5):
            wanted = page(SEED, PLANE_KEYS[plane], TOKENS * block, vector_bytes)
            expected.page(plane, block)[:] = wanted
    fill(arena, num_threads=num_threads)
    assert np.array_equal(arena.memory, expected.memory)
    assert find(arena, num_threads=num_threads) == (0, NO_PAGE)


@settings(max_examples=60)
@given(seed=st.integers(0, MASK), plane_key=st.integers(0, MASK), token_key=st.integers(0, MASK))
def test_any_seed_and_key_wrap_as_64_bits(seed: int, plane_key: int, token_key: int) -> None:
    arena = make_arena(1, 1, PAGE_BYTES, seed=1)
    made = tables(arena, [plane_key], [token_key])
    _core.pattern_fill_host(_core.WorkerPool(1), made, seed)
    assert np.array_equal(arena.page(0, 0), page(seed, plane_key, token_key))


def test_no_word_stands_for_another() -> None:
    # 3 seeds x 200 keys x 64 words, all different: no page is a shifted or relabelled other.
    words = [pattern(SEED + seed, key, 64) for seed in range(3) for key in range(200)]
    assert np.unique(np.concatenate(words)).size == 3 * 200 * 64


def test_no_pages_have_no_wrong_words() -> None:
    for shape in ((0, 0), (0, 3), (3, 0)):
        arena = make_arena(*shape, PAGE_BYTES, seed=1)
        fill(arena)
        assert find(arena) == (0, NO_PAGE)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("bit", [0, 7, 63, 64, 1000, PAGE_BYTES * 8 - 1])
@pytest.mark.parametrize(("plane", "block"), [(0, 0), (1, 3), (2, 4)])
def test_a_single_flipped_bit_is_found(
    filled: Arena, plane: int, block: int, bit: int, num_threads: int
) -> None:
    filled.page(plane, block)[bit // 8] ^= 1 << (bit % 8)
    assert find(filled, num_threads=num_threads) == (1, 5 * plane + block)


def test_permuted_pages_are_found(filled: Arena) -> None:
    one, two = filled.page(0, 4).copy(), filled.page(2, 1).copy()
    filled.page(0, 4)[:], filled.page(2, 1)[:] = two, one
    assert find(filled) == (2 * PAGE_WORDS, 4)


def test_blocks_permuted_alike_in_every_plane_are_found(filled: Arena) -> None:
    swapped = Arena(
        filled.memory,
        filled.plane_offsets,
        [*filled.block_offsets[1::-1], *filled.block_offsets[2:]],
        PAGE_BYTES,
    )
    assert find(swapped) == (3 * 2 * PAGE_WORDS, 0)


def test_swapped_planes_are_found(filled: Arena) -> None:
    swapped = Arena(filled.memory, filled.plane_offsets[::-1], filled.block_offsets, PAGE_BYTES)
    assert find(swapped) == (2 * 5 * PAGE_WORDS, 0)


@pytest.mark.parametrize("shift_bytes", [1, 8, 16, 64, PAGE_BYTES - 8])
def test_a_shifted_page_is_found(filled: Arena, shift_bytes: int) -> None:
    page = filled.page(1, 2)
    page[:] = np.roll(page, shift_bytes)
    assert find(filled) == (PAGE_WORDS, 7)


def test_a_duplicated_page_is_found(filled: Arena) -> None:
    filled.page(1, 2)[:] = filled.page(1, 1)
    assert find(filled) == (PAGE_WORDS, 7)


def test_a_stale_page_is_found(filled: Arena) -> None:
    stale = filled.page(2, 0).copy()
    fill(filled, seed=SEED + 1)
    assert find(filled, seed=SEED + 1) == (0, NO_PAGE)
    filled.page(2, 0)[:] = stale
    assert find(filled, seed=SEED + 1) == (PAGE_WORDS, 10)
    # All of it is stale to a check of the next round.
    assert find(filled, seed=SEED + 2) == (15 * PAGE_WORDS, 0)


def test_a_page_cut_short_is_found(filled: Arena) -> None:
    filled.page(0, 3)[PAGE_BYTES - 8 :] = 0
    assert find(filled) == (1, 3)


def test_pages_that_were_never_written_are_found() -> None:
    arena = make_arena(3, 5, PAGE_BYTES, seed=1)
    arena.memory[:] = 0
    assert find(arena) == (15 * PAGE_WORDS, 0)


def test_pages_past_4_gib_are_filled_and_checked_where_they_are() -> None:
    offsets = [0, 2 * GIB, 4 * GIB, 4 * GIB + 4096, 5 * GIB - 4096]
    arena = Arena(sparse_memory(5 * GIB), [0], offsets, 4096)
    fill(arena)
    for block in range(len(offsets)):
        assert np.array_equal(arena.page(0, block), page(SEED, 0, TOKENS * block, 512))
    assert find(arena) == (0, NO_PAGE)
    arena.page(0, 3)[0] ^= 1
    assert find(arena) == (1, 3)
