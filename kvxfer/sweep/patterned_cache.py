"""A cache for a sweep: allocated, filled with the position-dependent pattern, and checked.

Every page has a key, its index in the pool of the source (plane x pool_blocks + block), so a page
that arrives in the wrong place, from the wrong place or from an earlier round is found.
"""

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer import _core
from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout
from kvxfer.memory import KVCache, shared_empty


class PatternedCache:
    """One side's pool of pages.

    Attributes:
        cache: the registered cache, one array for all planes.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        memory: str,
        device: int,
        num_threads: int,
    ) -> None:
        """Allocate ``num_blocks`` blocks in ``shared``, ``private`` or ``device`` memory.

        Whether the host has enough is for :func:`require_host_memory` to say, once for both sides.

        Raises:
            InvalidUsage: an unknown memory.
            CudaError: the GPU has too little memory.
        """
        array = _allocate(num_blocks * layout.block_bytes, memory, device)
        self.cache = KVCache(layout, array)
        self._pool = _core.WorkerPool(num_threads)
        self._device = self.cache.device

    def fill(self, seed: int, block_ids: NDArray[np.int64] | None = None) -> None:
        """Write the pattern of ``seed`` into ``block_ids`` of every plane; None = all blocks."""
        ids = np.arange(self.cache.num_blocks) if block_ids is None else block_ids
        self._fill(self._tables(ids, ids), seed)

    def fill_prefix(self, seed: int, num_bytes: int) -> None:
        """Write the pattern of ``seed`` into the whole pages of the first ``num_bytes``.

        Raises:
            InvalidUsage: more than the pool has.
        """
        self._fill(self._prefix(num_bytes), seed)

    def check(
        self, seed: int, block_ids: NDArray[np.int64], source_ids: NDArray[np.int64]
    ) -> _core.PatternMismatch:
        """Compare ``block_ids`` with what ``source_ids`` of an equal pool were filled with."""
        return self._check(self._tables(block_ids, source_ids), seed)

    def check_prefix(self, seed: int, num_bytes: int) -> _core.PatternMismatch:
        """Compare the first ``num_bytes`` (whole pages) with those of a pool filled by ``seed``.

        Raises:
            InvalidUsage: more than the pool has.
        """
        return self._check(self._prefix(num_bytes), seed)

    def close(self) -> None:
        """Give up the registration."""
        self.cache.close()

    def _tables(
        self, block_ids: NDArray[np.int64], key_ids: NDArray[np.int64]
    ) -> _core.PatternTables:
        view = self.cache.view
        if block_ids.size != key_ids.size:
            raise InvalidUsage(f"{block_ids.size} blocks, but {key_ids.size} of the source")
        for ids in (block_ids, key_ids):
            if ids.size and not 0 <= ids.min() <= ids.max() < view.num_blocks:
                raise InvalidUsage(
                    f"block ids {ids.min()} to {ids.max()}; the pool has 0 to {view.num_blocks - 1}"
                )
        planes = np.arange(view.plane_addresses.size, dtype=np.uint64)
        return _core.PatternTables(
            view.plane_addresses,
            planes * np.uint64(view.num_blocks),
            block_ids.astype(np.uint64) * np.uint64(view.block_stride_bytes),
            key_ids.astype(np.uint64),
            view.layout.page_bytes,
        )

    def _prefix(self, num_bytes: int) -> _core.PatternTables:
        pool_bytes = self.cache.num_blocks * self.cache.layout.block_bytes
        if num_bytes > pool_bytes:
            raise InvalidUsage(f"{num_bytes} bytes of a pool of {pool_bytes}")
        page_bytes = self.cache.layout.page_bytes
        keys = np.arange(num_bytes // page_bytes, dtype=np.uint64)
        return _core.PatternTables(
            self.cache.view.plane_addresses[:1],
            np.zeros(1, np.uint64),
            keys * np.uint64(page_bytes),
            keys,
            page_bytes,
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


def unlisted(block_ids: Sequence[int] | NDArray[np.int64], num_blocks: int) -> NDArray[np.int64]:
    """The blocks of a pool that are not in ``block_ids``."""
    mask = np.ones(num_blocks, dtype=bool)
    mask[np.asarray(block_ids, dtype=np.int64)] = False
    return np.flatnonzero(mask)


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
