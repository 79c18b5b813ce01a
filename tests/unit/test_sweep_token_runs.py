"""Which tokens carry which pattern, against arithmetic token by token."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidUsage, VerificationError
from kvxfer.layout import KVLayout, TPLayout
from kvxfer.sweep.messages import ByteRange, Checked
from kvxfer.sweep.patterned_cache import PatternedCache
from kvxfer.sweep.token_runs import TokenRuns

MODEL = KVLayout(3, 4, head_dim=12, block_size=4)
NUM_BLOCKS = 6


def places(runs: TokenRuns) -> list[tuple[int, int, int]]:
    """(block, slot, key) of every token."""
    rows = zip(runs.block_ids, runs.slots, runs.counts, runs.keys, strict=True)
    return [
        (int(block), int(slot) + step, int(key) + step)
        for block, slot, count, key in rows
        for step in range(count)
    ]


def ids_of(count: int, pool: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(pool)[:count].astype(np.int64)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 60), st.integers(0, 9))
def test_a_request_token_by_token(size: int, source_size: int, count: int, seed: int) -> None:
    here = ids_of(-(-count // size), 70, seed)
    there = ids_of(-(-count // source_size), 70, seed + 1)
    runs = TokenRuns.request(
        here, there, block_size=size, source_block_size=source_size, count=count
    )
    assert places(runs) == [
        (here[t // size], t % size, there[t // source_size] * source_size + t % source_size)
        for t in range(count)
    ]
    assert runs.num_tokens == count
    assert (runs.slots + runs.counts <= size).all()


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 9))
def test_what_is_outside_a_request(size: int, count: int, seed: int) -> None:
    pool = 2 * -(-count // size) + 1
    here = ids_of(-(-count // size), pool, seed)
    runs = TokenRuns.outside_request(here, block_size=size, num_blocks=pool, count=count)
    inside = {(int(here[t // size]), t % size) for t in range(count)}
    found = places(runs)
    assert {(block, slot) for block, slot, _ in found} == {
        (block, slot) for block in range(pool) for slot in range(size)
    } - inside
    assert all(key == block * size + slot for block, slot, key in found)
    assert len(found) == len(set(found))


@pytest.mark.parametrize(("here", "there"), [([0, 1], [0]), ([0], [0, 1]), ([], [0])])
def test_a_table_of_another_length_is_refused(here: list[int], there: list[int]) -> None:
    tables = (np.array(one, np.int64) for one in (here, there))
    with pytest.raises(InvalidUsage, match=f"{len(here)} blocks, but {len(there)} of the source"):
        TokenRuns.request(*tables, block_size=4, source_block_size=4, count=3)


def pool_of(layout: KVLayout = MODEL, rank: TPLayout | None = None) -> PatternedCache:
    return PatternedCache(layout, NUM_BLOCKS, memory="private", device=-1, num_threads=1, rank=rank)


def content(pool: PatternedCache) -> np.ndarray:
    """The pool as ``[layer, vector, block, slot, head, byte]``, by its strides."""
    view, layout = pool.cache.view, pool.cache.layout
    memory = np.asarray(pool.cache.registrations[0].buffer.owner)
    offsets = view.addresses.astype(np.int64) - pool.start_address
    axes = (
        (NUM_BLOCKS, view.block_stride_bytes),
        (layout.block_size, view.token_stride_bytes),
        (layout.num_kv_heads, view.head_stride_bytes),
        (layout.vector_bytes, 1),
    )
    index = offsets
    for count, stride in axes:
        index = index[..., None] + np.arange(count) * stride
    return memory[index]


LAYOUTS = [
    MODEL,
    replace(MODEL, order="hnd"),
    replace(MODEL, kv="packed", order="hnd"),
    replace(MODEL, kv="head_packed"),
    replace(MODEL, kv="chunked"),
]
RANKS = [TPLayout(), TPLayout(2, 1), TPLayout(3, 1), TPLayout(2, 0, pp_size=2, pp_rank=1)]


@pytest.mark.parametrize("rank", RANKS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.kv} {layout.order}")
def test_the_pattern_does_not_depend_on_layout_or_rank(layout: KVLayout, rank: TPLayout) -> None:
    whole, part = pool_of(), pool_of(layout, rank)
    for pool in (whole, part):
        pool.fill(7)
    shard = part.cache.shard
    expected = content(whole)[shard.layers.start : shard.layers.stop]
    expected = expected[..., shard.heads.start : shard.heads.stop, :]
    assert (content(part) == expected).all()
    assert content(part).size == part.num_bytes


def test_no_two_vectors_are_alike_and_seeds_differ() -> None:
    pool = pool_of()
    pool.fill(7)
    first = content(pool).reshape(-1, MODEL.vector_bytes)
    pool.fill(8)
    both = np.concatenate([first, content(pool).reshape(-1, MODEL.vector_bytes)])
    assert len(np.unique(both, axis=0)) == len(both)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=["nhd", "hnd"])
def test_a_check_sees_any_changed_byte(layout: KVLayout) -> None:
    pool = pool_of(layout)
    pool.fill(7)
    runs = TokenRuns.whole_blocks(np.arange(NUM_BLOCKS), layout.block_size)
    assert pool.check(7, runs).num_wrong == 0
    memory = np.asarray(pool.cache.registrations[0].buffer.owner)
    for place in np.random.default_rng(1).integers(0, pool.num_bytes, 40):
        memory[place] ^= 1
        found = pool.check(7, runs)
        assert found.num_wrong == 1
        assert found.first.startswith("layer ")
        memory[place] ^= 1
    assert pool.check(7, runs).num_wrong == 0


def test_the_first_wrong_place_is_named_as_the_model_numbers_it() -> None:
    pool = pool_of(rank=TPLayout(pp_size=3, pp_rank=2))
    pool.fill(7)
    view = pool.cache.view
    memory = np.asarray(pool.cache.registrations[0].buffer.owner)
    offset = int(view.addresses[0, 1]) - pool.start_address + 5 * view.block_stride_bytes
    memory[offset] ^= 1
    runs = TokenRuns.whole_blocks(np.array([3, 5]), MODEL.block_size)
    found = pool.check(7, runs)
    assert found.first == "layer 2 V, block 5, slot 0"
    num_bytes = 2 * MODEL.block_size * MODEL.bytes_per_token_per_layer
    with pytest.raises(VerificationError, match=f"it: 1 of {num_bytes // 8} 8-byte words are wro"):
        found.require_none_wrong("it")


@pytest.mark.parametrize("num_bytes", [2, 30, 4096, 4097, 4098, 8192, 13001])
def test_ranges_of_equal_keys_are_equal_wherever_they_lie(num_bytes: int) -> None:
    layout = replace(MODEL, block_size=64)
    one, other = pool_of(layout), pool_of(layout)
    for pool in (one, other):
        pool.fill_ranges(3, [ByteRange(0, pool.num_bytes, 9)])
    here, there = ByteRange(64, num_bytes, 1), ByteRange(128, num_bytes, 1)
    one.fill_ranges(7, [here])
    memories = [np.asarray(pool.cache.registrations[0].buffer.owner) for pool in (one, other)]
    memories[1][128 : 128 + num_bytes] = memories[0][64 : 64 + num_bytes]
    assert other.check_ranges(7, [there]).num_wrong == 0
    assert other.check_ranges(8, [there]).num_wrong > 0
    assert other.check_ranges(7, [ByteRange(128, num_bytes, 2)]).num_wrong > 0
    memories[1][128 + (num_bytes - 1) // 2 * 2 - 1] ^= 1
    found = other.check_ranges(7, [there])
    assert (found.num_wrong == 1) == (num_bytes > 2)  # of two bytes it is the one before
    with pytest.raises(InvalidUsage, match="of a pool of"):
        one.fill_ranges(7, [ByteRange(one.num_bytes, 2)])


def test_a_finding_of_nothing_raises_nothing() -> None:
    Checked(num_wrong=0, num_checked=5).require_none_wrong("it")
    with pytest.raises(VerificationError, match="it: 2 of 5 bytes are wrong at the destination"):
        Checked(num_wrong=2, num_checked=5, unit=1, first="x").require_none_wrong("it")
