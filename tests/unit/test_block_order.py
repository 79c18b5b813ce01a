"""Block tables: each order gives different ids of the pool, in the runs that it names."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.errors import InvalidUsage
from kvxfer.sweep.block_order import BlockOrder


def draw(text: str, count: int, pool: int, seed: int = 0) -> NDArray[np.int64]:
    return BlockOrder.parse(text).draw(count, pool, np.random.default_rng(seed))


def problems(ids: NDArray[np.int64], count: int, pool: int, run: int) -> list[str]:
    """What is wrong with a table whose runs should be of ``run`` neighbours."""
    found = []
    if ids.dtype != np.int64 or ids.shape != (count,):
        found.append(f"{ids.dtype} {ids.shape}")
    if len(set(ids.tolist())) != count:
        found.append("an id twice")
    if count and not 0 <= ids.min() <= ids.max() < pool:
        found.append("an id outside the pool")
    steps = np.diff(ids)
    inside = np.arange(1, ids.size) % run != 0
    if (steps[inside] != 1).any():
        found.append("a run is broken")
    return found


@pytest.mark.parametrize(
    ("text", "run_blocks", "shown"),
    [
        ("shuffled", 1, "shuffled"),
        (" Shuffled ", 1, "shuffled"),
        ("contiguous", 0, "contiguous"),
        ("fragmented:1", 1, "fragmented:1"),
        ("FRAGMENTED:16", 16, "fragmented:16"),
    ],
)
def test_forms(text: str, run_blocks: int, shown: str) -> None:
    assert BlockOrder.parse(text) == BlockOrder(shown, run_blocks)


@pytest.mark.parametrize(
    "text",
    [
        *["", "random", "fragmented", "fragmented:", "fragmented:0", "fragmented:00"],
        *[
            "fragmented:-1",
            "fragmented4",
            "fragmented:1.5",
            "fragmented: 4",
            "fragmented:" + "9" * 5000,
        ],
        *["shuffled:", "shuffled:4", "contiguous:1", "shuffled,contiguous"],
    ],
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(InvalidUsage, match="use shuffled, contiguous or fragmented:R"):
        BlockOrder.parse(text)


def test_contiguous_is_one_run_from_the_start() -> None:
    assert draw("contiguous", 5, 10).tolist() == [0, 1, 2, 3, 4]


def test_shuffled_is_a_subset_in_disorder() -> None:
    ids = draw("shuffled", 512, 1024)
    assert problems(ids, 512, 1024, 1) == []
    assert ids.max() >= 512  # not the first half only
    assert (np.diff(ids) == 1).sum() < 16  # hardly any neighbours
    assert ids.tolist() != sorted(ids.tolist())


def test_fragments_are_whole_and_apart() -> None:
    ids = draw("fragmented:8", 100, 208)  # 12 runs and a half
    assert problems(ids, 100, 208, 8) == []
    assert (ids[::8] % 8 == 0).all()
    assert (np.diff(ids[::8]) != 8).any()


@pytest.mark.parametrize("text", ["shuffled", "fragmented:4"])
def test_the_seed_decides(text: str) -> None:
    first, again, other = (draw(text, 64, 128, seed).tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("text", ["shuffled", "contiguous", "fragmented:3"])
@given(count=st.integers(0, 50), spare=st.integers(0, 50), seed=st.integers(0, 1000))
def test_any_size(text: str, count: int, spare: int, seed: int) -> None:
    run = BlockOrder.parse(text).run_blocks or max(count, 1)
    pool = -(-count // run) * run + spare
    assert problems(draw(text, count, pool, seed), count, pool, run) == []


@pytest.mark.parametrize(
    ("text", "count", "pool"),
    [("shuffled", 5, 4), ("contiguous", 5, 4), ("fragmented:4", 5, 7), ("fragmented:9", 1, 8)],
)
def test_a_pool_that_is_too_small(text: str, count: int, pool: int) -> None:
    with pytest.raises(InvalidUsage, match=f"do not fit a pool of {pool}"):
        draw(text, count, pool)


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([0, 1, 1, 2], "an id twice"),
        ([0, 1, 6, 8], "an id outside the pool"),
        ([0, -1, 2, 3], "an id outside the pool"),
        ([0, 2, 4, 5], "a run is broken"),
        ([0, 1, 2], "int64 (3,)"),
    ],
)
def test_the_check_sees_a_wrong_table(ids: list[int], problem: str) -> None:
    assert problems(np.array([2, 3, 6, 7], np.int64), 4, 8, 2) == []
    assert problem in problems(np.array(ids, np.int64), 4, 8, 2)
