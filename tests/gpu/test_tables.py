"""Block tables of transfers in flight: each uses its own, though the caller's arrays live on."""

from typing import Any

import numpy as np
import pytest
from gpu_pairs import RawCopier, RawMemory, page_tables, words

from kvxfer import _core
from kvxfer.errors import InvalidUsage

PAGE_BYTES = 256
NUM_PAGES = 1 << 15
MAX_IN_FLIGHT = 64
# Small tables ride in the kernel's parameters; others are uploaded.
SMALL, LARGE = 16, 1000


class Tables:
    """Arrays that one post after the other is made from, as an engine reuses its buffers."""

    def __init__(self, src: RawMemory, dst: RawMemory, num_blocks: int) -> None:
        self._src, self._dst = src, dst
        self._segments = np.zeros((num_blocks, 4), np.uint32)
        self._tables = page_tables(
            words(src.address),
            words(dst.address),
            self._segments,
            PAGE_BYTES,
            (PAGE_BYTES, PAGE_BYTES),
        )

    def post(self, copier: RawCopier, src_pages: Any, dst_pages: Any, **options: Any) -> None:
        """Post pages, then spoil the arrays: what was posted must not look at them again."""
        self._segments[:, 0], self._segments[:, 1] = src_pages, dst_pages
        copier.post(self._tables, **options)
        self._segments[:] = 0
        from_, to = (one.model.reshape(-1, PAGE_BYTES) for one in (self._src, self._dst))
        to[dst_pages] = from_[src_pages]


@pytest.fixture
def src() -> RawMemory:
    return RawMemory(NUM_PAGES * PAGE_BYTES, seed=1)


@pytest.fixture
def dst() -> RawMemory:
    return RawMemory(NUM_PAGES * PAGE_BYTES, seed=2)


def draw(random: np.random.Generator, count: int) -> Any:
    return random.permutation(NUM_PAGES)[:count]


def stall(copier: RawCopier, src: RawMemory, dst: RawMemory) -> None:
    """Keep the copier's stream busy for some milliseconds."""
    tables = Tables(src, dst, SMALL)
    pages = np.arange(SMALL)
    tables.post(copier, pages, pages, fault=_core.CopyFault.DELAY_BLOCK_0)


@pytest.fixture(params=["BULK", "LOAD_STORE", "DMA"])
def engine(request: pytest.FixtureRequest) -> _core.CopyEngine:
    if request.param == "BULK" and _core.device_info(0).compute_major < 9:
        pytest.skip(reason="bulk copies need compute capability 9.0")
    return _core.CopyEngine.__members__[request.param]


inline_and_uploaded = pytest.mark.parametrize(
    "num_blocks", [SMALL, LARGE], ids=["inline", "uploaded"]
)


@inline_and_uploaded
def test_posts_behind_a_stalled_stream_keep_their_own_tables(
    src: RawMemory, dst: RawMemory, num_blocks: int, engine: _core.CopyEngine
) -> None:
    random = np.random.default_rng(3)
    copier = RawCopier()
    tables = Tables(src, dst, num_blocks)
    for _ in range(MAX_IN_FLIGHT):
        # Once each, because the first use of a place in flight may wait for the GPU by itself.
        tables.post(copier, draw(random, num_blocks), draw(random, num_blocks), engine=engine)
    copier.wait()
    stall(copier, src, dst)
    for _ in range(2):
        tables.post(copier, draw(random, num_blocks), draw(random, num_blocks), engine=engine)
    copier.wait()
    dst.check()


def test_the_check_sees_a_table_that_was_overwritten(src: RawMemory, dst: RawMemory) -> None:
    copier = RawCopier()
    tables = Tables(src, dst, SMALL)
    tables.post(copier, np.zeros(SMALL, np.int64), np.arange(SMALL))
    copier.wait()
    dst.model[:PAGE_BYTES] = src.model[PAGE_BYTES : 2 * PAGE_BYTES]  # as if of another table
    with pytest.raises(AssertionError, match="bytes are wrong, the first at"):
        dst.check()


@inline_and_uploaded
def test_more_transfers_than_there_is_room_for_in_flight(
    src: RawMemory, dst: RawMemory, num_blocks: int, engine: _core.CopyEngine
) -> None:
    random = np.random.default_rng(4)
    copier = RawCopier()
    tables = Tables(src, dst, num_blocks)
    stall(copier, src, dst)
    for _ in range(3 * MAX_IN_FLIGHT + 7):
        # In order, so a later transfer may overwrite the pages of an earlier one.
        tables.post(copier, draw(random, num_blocks), draw(random, num_blocks), engine=engine)
    copier.wait()
    dst.check()
    src.check()


def test_tables_that_grow_while_others_are_in_flight(src: RawMemory, dst: RawMemory) -> None:
    random = np.random.default_rng(5)
    copier = RawCopier()
    stall(copier, src, dst)
    sizes = [10, 300, 5_000, 40, 30_000, 200, 12_000, 1] * 20
    for size in sizes:
        Tables(src, dst, size).post(copier, draw(random, size), draw(random, size))
    copier.wait()
    dst.check()


def test_small_and_large_tables_in_turn(src: RawMemory, dst: RawMemory) -> None:
    # Somewhere among these are the last that ride along and the first that do not.
    random = np.random.default_rng(6)
    copier = RawCopier()
    for size in [*range(150, 190), *range(190, 150, -1)]:
        Tables(src, dst, size).post(copier, draw(random, size), draw(random, size))
    copier.wait()
    dst.check()


def test_a_refused_post_leaves_the_copier_as_it_was(src: RawMemory, dst: RawMemory) -> None:
    copier = RawCopier()
    tables = Tables(src, dst, SMALL)
    pages = np.arange(SMALL)
    for _ in range(3 * MAX_IN_FLIGHT):
        with pytest.raises(InvalidUsage, match="num_sms"):
            tables.post(copier, pages, pages, num_sms=1 << 20)
    tables.post(copier, pages, pages + SMALL)
    copier.wait()
    assert copier.sequence == 1
    dst.check()
