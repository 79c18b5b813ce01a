"""A copy plan carried out in numpy, as `csrc/copy/copy_plan.hpp` says that it must be."""

import numpy as np
from fp8_oracle import convert
from numpy.typing import NDArray

from kvxfer.layout import CopyBox, CopyPlan

Indices = NDArray[np.int64]


def carry_out(plan: CopyPlan, memory: NDArray[np.uint8]) -> Indices:
    """Copy within ``memory``, where an address is an index; all reads come before all writes.

    Returns the bytes written, each once; fails where one is written twice.
    """
    places, values = [np.empty(0, np.int64)], [np.empty(0, np.uint8)]
    for box in plan.boxes:
        src, dst = runs(plan, box)
        if plan.conversion == "none":
            run = np.arange(box.run_bytes)
            places.append((dst[..., None] + run).reshape(-1))
            values.append(memory[src[..., None] + run].reshape(-1))
        else:
            num_elements = box.run_bytes // 2
            bits = memory[src[..., None] + np.arange(box.run_bytes)].view(np.uint16)
            scales = plan.inverse_scales[_scales(box)][..., None]
            places.append((dst[..., None] + np.arange(num_elements)).reshape(-1))
            values.append(convert(bits, plan.conversion, scales).reshape(-1))
    written = np.concatenate(places)
    ordered = np.sort(written)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    assert not twice.size, f"byte {twice[0]} is written twice"
    memory[written] = np.concatenate(values)
    return written


def runs(plan: CopyPlan, box: CopyBox) -> tuple[Indices, Indices]:
    """Addresses ``[planes, segments, outer, inner]`` of the runs of a box at both sides."""
    planes = slice(box.first_plane, box.first_plane + box.num_planes)
    segments = plan.segments[box.first_segment : box.first_segment + box.num_segments]
    src_block, dst_block, src_slot, dst_slot = segments.astype(np.int64).T
    outer, inner = np.ogrid[: box.outer_count, : box.inner_count]
    assert len(plan.src_planes[planes]) == box.num_planes, "planes past the end of the table"
    assert len(segments) == box.num_segments, "segments past the end of the table"
    src_page = src_block * box.src_block_stride + src_slot * box.src_slot_stride
    dst_page = dst_block * box.dst_block_stride + dst_slot * box.dst_slot_stride
    src_row = outer * box.outer_src_stride + inner * box.inner_src_stride
    dst_row = outer * box.outer_dst_stride + inner * box.inner_dst_stride
    src, dst = plan.src_planes[planes].astype(np.int64), plan.dst_planes[planes].astype(np.int64)
    return (
        src[:, None, None, None] + src_page[:, None, None] + src_row,
        dst[:, None, None, None] + dst_page[:, None, None] + dst_row,
    )


def _scales(box: CopyBox) -> Indices:
    """Which scale each run uses, ``[planes, 1, outer, inner]``."""
    plane, outer, inner = np.ogrid[: box.num_planes, : box.outer_count, : box.inner_count]
    index = (
        box.first_scale
        + plane * box.scale_plane_step
        + outer * box.outer_scale_step
        + inner * box.inner_scale_step
    )
    return index[:, None]
