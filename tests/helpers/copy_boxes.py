"""Strided copies as the core's tables, and the same copies by numpy's fancy indexing."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer import _core

NO_SCALES = np.zeros(0, np.float32)


class CopyBox(NamedTuple):
    """One row of the core's table of boxes; written out here, so that a swapped column is seen."""

    first_plane: int
    num_planes: int
    first_segment: int
    num_segments: int
    src_block_stride: int = 0
    dst_block_stride: int = 0
    src_slot_stride: int = 0
    dst_slot_stride: int = 0
    outer_count: int = 1
    outer_src_stride: int = 0
    outer_dst_stride: int = 0
    inner_count: int = 1
    inner_src_stride: int = 0
    inner_dst_stride: int = 0
    run_bytes: int = 1
    first_scale: int = 0
    scale_plane_step: int = 0
    outer_scale_step: int = 0
    inner_scale_step: int = 0


def core_tables(
    src_planes: NDArray[np.uint64],
    dst_planes: NDArray[np.uint64],
    segments: NDArray[np.uint32],
    boxes: Sequence[CopyBox],
    inverse_scales: NDArray[np.float32] = NO_SCALES,
    conversion: str = "none",
) -> _core.PlanTables:
    """The tables of a plan."""
    rows = np.array(boxes, np.uint64).reshape(len(boxes), len(CopyBox._fields))
    return _core.PlanTables(src_planes, dst_planes, segments, rows, inverse_scales, conversion)


def row_index(
    box: CopyBox, side: str, planes: Sequence[int], segments: NDArray[np.uint32]
) -> NDArray[np.int64]:
    """Where each row of a box begins on ``side`` (src or dst), [planes, segments, outer, inner]."""
    stride = {
        name.removeprefix(f"{side}_").replace(f"_{side}_", "_"): value
        for name, value in box._asdict().items()
        if f"{side}_" in name
    }
    table = segments.astype(np.int64)[box.first_segment :][: box.num_segments]
    block, slot = (table[:, 0], table[:, 2]) if side == "src" else (table[:, 1], table[:, 3])
    pages = block * stride["block_stride"] + slot * stride["slot_stride"]
    bases = np.array(planes, np.int64)[box.first_plane :][: box.num_planes]
    return (
        bases[:, None, None, None]
        + pages[None, :, None, None]
        + (np.arange(box.outer_count) * stride["outer_stride"])[None, None, :, None]
        + (np.arange(box.inner_count) * stride["inner_stride"])[None, None, None, :]
    )


def byte_index(rows: NDArray[np.int64], run_bytes: int) -> NDArray[np.int64]:
    """The bytes of rows that begin there, one axis more."""
    return rows[..., None] + np.arange(run_bytes)


def scale_index(box: CopyBox) -> NDArray[np.int64]:
    """Which scale each row takes, [planes, 1, outer, inner]."""
    planes = box.first_scale + np.arange(box.num_planes) * box.scale_plane_step
    outer = np.arange(box.outer_count) * box.outer_scale_step
    inner = np.arange(box.inner_count) * box.inner_scale_step
    return planes[:, None, None, None] + outer[:, None] + inner


def copied_boxes(
    source: Any,
    target: Any,
    src_planes: Sequence[int],
    dst_planes: Sequence[int],
    segments: NDArray[np.uint32],
    boxes: Sequence[CopyBox],
) -> Any:
    """What ``target`` must hold afterwards; planes are offsets into the two arrays of bytes."""
    result = target.copy()
    for box in boxes:
        found = source[byte_index(row_index(box, "src", src_planes, segments), box.run_bytes)]
        result[byte_index(row_index(box, "dst", dst_planes, segments), box.run_bytes)] = found
    return result
