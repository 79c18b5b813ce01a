"""One rank's cache for a sweep: allocated, filled with the pattern, and checked.

The pattern of a vector depends on its layer, K or V, token and head alone, as the whole model
numbers them. So any two ranks agree on it, whatever their layouts, and a vector that arrives in the
wrong place, from the wrong place or from an earlier round is found.
"""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer import _core
from kvxfer.errors import InvalidUsage
from kvxfer.layout import DTYPE_BYTES, KVLayout, TPLayout
from kvxfer.memory import KVCache, shared_empty
from kvxfer.sweep.messages import ByteRange, Checked
from kvxfer.sweep.token_runs import TokenRuns

_NOT_CONVERTED = "none"
# Planes are this far apart in the keys: more than all tokens and heads of one.
_PLANE_KEY_SHIFT = np.uint64(48)
# Above those of all layers.
_RANGE_PLANE = 1 << 15
_RANGE_PAGE_BYTES = 4096
_WORD_BYTES = 8


class PatternedCache:
    """One rank's pool of blocks.

    Attributes:
        cache: the registered cache, one array for all layers.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        memory: str,
        device: int,
        num_threads: int,
        rank: TPLayout | None = None,
    ) -> None:
        """Allocate ``num_blocks`` blocks in ``shared``, ``private`` or ``device`` memory.

        Whether the host has enough is for :func:`require_host_memory` to say, once for both sides.

        Args:
            layout: the whole model's.
            num_blocks: blocks of the pool.
            memory: which memory.
            device: the CUDA device of ``device`` memory.
            num_threads: threads that fill and check.
            rank: whose part of the model it is; None = the only one.

        Raises:
            InvalidUsage: an unknown memory.
            CudaError: the GPU has too little memory.
        """
        rank = rank or TPLayout()
        array = _allocate(num_blocks * rank.rank_layout(layout).block_bytes, memory, device)
        self.cache = KVCache(layout, array, rank=rank)
        self._pool = _core.WorkerPool(num_threads)
        self._device = self.cache.device

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self.cache.num_blocks * self.cache.layout.block_bytes

    @property
    def start_address(self) -> int:
        """Where the pool begins."""
        return self.cache.registrations[0].buffer.address

    def fill(self, seed: int, block_ids: NDArray[np.int64] | None = None) -> None:
        """Write the pattern of ``seed`` into ``block_ids`` of every layer; None = all blocks."""
        ids = np.arange(self.cache.num_blocks) if block_ids is None else block_ids
        runs = TokenRuns.whole_blocks(ids, self.cache.layout.block_size)
        self.fill_tokens(seed, runs)

    def fill_tokens(self, seed: int, runs: TokenRuns) -> None:
        """Write the pattern of ``seed`` into certain tokens of every layer, under their keys."""
        self._fill(self._tables(runs, _NOT_CONVERTED), seed)

    def check(self, seed: int, runs: TokenRuns, *, converted_from: str = _NOT_CONVERTED) -> Checked:
        """Compare tokens with what the source's were filled with.

        Args:
            seed: of the fill.
            runs: the tokens, where they lie here.
            converted_from: the dtype that they had before they became fp8 at a scale of 1.
        """
        tables = self._tables(runs, converted_from)
        layout = self.cache.layout
        num_bytes = runs.num_tokens * layout.num_layers * layout.bytes_per_token_per_layer
        unit = _WORD_BYTES if converted_from == _NOT_CONVERTED else 1
        found = self._check(tables, seed)
        first = self._place(found.first_page, runs) if found.num_wrong_words else ""
        return Checked(
            num_wrong=found.num_wrong_words, num_checked=num_bytes // unit, unit=unit, first=first
        )

    def fill_ranges(self, seed: int, ranges: list[ByteRange]) -> None:
        """Write the pattern of ``seed`` into bytes of the pool.

        Raises:
            InvalidUsage: they end outside the pool.
        """
        for one in ranges:
            for tables in self._range_tables(one):
                self._fill(tables, seed)

    def check_ranges(self, seed: int, ranges: list[ByteRange]) -> Checked:
        """Compare bytes of the pool with ranges of equal keys that were filled elsewhere.

        Raises:
            InvalidUsage: they end outside the pool.
        """
        wrong, first = 0, ""
        for one in ranges:
            num_pages = 0
            for tables in self._range_tables(one):
                found = self._check(tables, seed)
                wrong += found.num_wrong_words
                if found.num_wrong_words and not first:
                    first = f"page {num_pages + found.first_page} from byte {one.offset_bytes}"
                num_pages += one.num_bytes // _RANGE_PAGE_BYTES
        num_words = sum(one.num_bytes for one in ranges) // _WORD_BYTES
        return Checked(num_wrong=wrong, num_checked=num_words, unit=_WORD_BYTES, first=first)

    def close(self) -> None:
        """Give up the registration."""
        self.cache.close()

    def _tables(self, runs: TokenRuns, conversion: str) -> _core.PatternTables:
        view, layout = self.cache.view, self.cache.layout
        ids = runs.block_ids
        if ids.size and not 0 <= ids.min() <= ids.max() < view.num_blocks:
            raise InvalidUsage(
                f"block ids {ids.min()} to {ids.max()}; the pool has 0 to {view.num_blocks - 1}"
            )
        converted = conversion != _NOT_CONVERTED
        itemsize_bytes = DTYPE_BYTES[conversion] if converted else layout.itemsize_bytes
        planes = view.addresses.reshape(-1)
        heads = view.shard.heads
        return _core.PatternTables(
            planes,
            self._plane_keys(),
            (ids * view.block_stride_bytes + runs.slots * view.token_stride_bytes).astype(
                np.uint64
            ),
            runs.keys.astype(np.uint64),
            runs.counts.astype(np.uint32),
            view.token_stride_bytes,
            view.head_stride_bytes,
            len(heads),
            heads.start,
            layout.head_dim * itemsize_bytes,
            conversion,
            np.ones(planes.size * len(heads) if converted else 0, np.float32),
        )

    def _plane_keys(self) -> NDArray[np.uint64]:
        layers = np.array(self.cache.shard.layers, dtype=np.uint64)
        vectors = np.arange(self.cache.layout.num_vectors, dtype=np.uint64)
        planes = (layers[:, None] * np.uint64(2) + vectors).reshape(-1)
        keys: NDArray[np.uint64] = planes << _PLANE_KEY_SHIFT
        return keys

    def _range_tables(self, one: ByteRange) -> list[_core.PatternTables]:
        """Whole pages of the range, and what is left of it."""
        end = one.offset_bytes + one.num_bytes
        if end > self.num_bytes:
            raise InvalidUsage(f"bytes to {end} of a pool of {self.num_bytes}")
        num_pages, rest = divmod(one.num_bytes, _RANGE_PAGE_BYTES)
        pages = np.arange(num_pages + 1, dtype=np.uint64)
        cuts = ((pages[:-1], _RANGE_PAGE_BYTES), (pages[-1:], rest - rest % 2))
        return [
            _core.PatternTables(
                np.array([self.start_address + one.offset_bytes], np.uint64),
                np.array([_RANGE_PLANE + one.key], np.uint64) << _PLANE_KEY_SHIFT,
                indices * np.uint64(_RANGE_PAGE_BYTES),
                indices,
                np.ones(indices.size, np.uint32),
                num_bytes,
                num_bytes,
                1,
                0,
                num_bytes,
            )
            for indices, num_bytes in cuts
            if indices.size and num_bytes
        ]

    def _place(self, page: int, runs: TokenRuns) -> str:
        plane, index = divmod(page, runs.block_ids.size)
        num_vectors = self.cache.layout.num_vectors
        layer, vector = divmod(plane, num_vectors)
        name = "" if num_vectors == 1 else (" K", " V")[vector]
        return (
            f"layer {self.cache.shard.layers[layer]}{name}, block {runs.block_ids[index]}, "
            f"slot {runs.slots[index]}"
        )

    def _fill(self, tables: _core.PatternTables, seed: int) -> None:
        if self._device < 0:
            _core.pattern_fill_host(self._pool, tables, seed)
        else:
            _core.pattern_fill_device(self._device, tables, seed)

    def _check(self, tables: _core.PatternTables, seed: int) -> _core.PatternMismatch:
        if self._device < 0:
            return _core.pattern_check_host(self._pool, tables, seed)
        return _core.pattern_check_device(self._device, tables, seed)


def _allocate(num_bytes: int, memory: str, device: int) -> Any:
    if memory == "device":
        return _core.DeviceBuffer(device, num_bytes)
    if memory == "shared":
        return shared_empty(num_bytes)
    if memory == "private":
        # Page-aligned, as engines' caches are, and with huge pages where the host grants them.
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(mapping, dtype=np.uint8)
    raise InvalidUsage(f"memory {memory!r}; use shared, private or device")
