"""Memory cut into planes of pages with room between them, and a copy of it in plain Python."""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from copy_boxes import CopyBox, core_tables
from numpy.typing import NDArray

from kvxfer import _core

MAP_NORESERVE = 0x4000  # linux/mman.h; the mmap module does not have it everywhere


@dataclass
class Arena:
    """Pages at ``plane_offsets[p] + block_offsets[b]`` of ``memory``, random bytes all over.

    Everything that is no page is a guard: compared like the rest, and never to be written.
    """

    memory: Any
    plane_offsets: Sequence[int]
    block_offsets: Sequence[int]
    page_bytes: int
    kept: Any = field(default=None, repr=False)

    @property
    def planes(self) -> NDArray[np.uint64]:
        base = self.memory.ctypes.data
        return np.array([base + offset for offset in self.plane_offsets], np.uint64)

    @property
    def offsets(self) -> NDArray[np.uint64]:
        return np.array(self.block_offsets, np.uint64)

    def page(self, plane: int, block: int) -> Any:
        """A view of one page."""
        start = self.plane_offsets[plane] + self.block_offsets[block]
        return self.memory[start : start + self.page_bytes]


def make_arena(
    num_planes: int,
    num_blocks: int,
    page_bytes: int,
    *,
    seed: int,
    shift: int = 0,
    gap_bytes: int = 64,
) -> Arena:
    """Pages in shuffled order, ``gap_bytes`` or more apart, ``shift`` behind multiples of 64."""
    random_ = np.random.default_rng(seed)
    stride = -(-(page_bytes + gap_bytes) // 64) * 64
    plane_bytes = stride * num_blocks + 64
    size = plane_bytes * num_planes + 128
    memory = random_.integers(0, 256, size + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    memory = memory[start : start + size]
    planes = [64 + shift + plane * plane_bytes for plane in random_.permutation(num_planes)]
    blocks = [stride * int(block) for block in random_.permutation(num_blocks)]
    return Arena(memory, planes, blocks, page_bytes)


def copied(src: Arena, dst: Arena) -> Any:
    """What ``dst.memory`` must hold after page (p, b) of ``src`` went to page (p, b) of ``dst``."""
    result = Arena(dst.memory.copy(), dst.plane_offsets, dst.block_offsets, dst.page_bytes)
    for plane in range(len(src.plane_offsets)):
        for block in range(len(src.block_offsets)):
            result.page(plane, block)[:] = src.page(plane, block)
    return result.memory


def plan_tables(src: Arena, dst: Arena) -> _core.PlanTables:
    """The core's tables of that copy: one box, a page a segment, one run a page."""
    src_stride, dst_stride = _stride(src), _stride(dst)
    segments = np.zeros((len(src.block_offsets), 4), np.uint32)
    segments[:, 0] = src.offsets // np.uint64(src_stride)
    segments[:, 1] = dst.offsets // np.uint64(dst_stride)
    box = CopyBox(
        first_plane=0,
        num_planes=len(src.plane_offsets),
        first_segment=0,
        num_segments=len(segments),
        src_block_stride=src_stride,
        dst_block_stride=dst_stride,
        run_bytes=src.page_bytes,
    )
    return core_tables(src.planes, dst.planes, segments, [box])


def _stride(arena: Arena) -> int:
    return math.gcd(*arena.block_offsets) or 1


def sparse_memory(num_bytes: int) -> Any:
    """Zeroed memory that costs only what is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), np.uint8)
