"""A plan as what other libraries take: an address on either side for every page."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidUsage
from kvxfer.layout import CopyPlan

Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Pages of one length.

    Attributes:
        src: uint64 ``[num_pages]``, addresses that are read.
        dst: uint64 ``[num_pages]``, addresses that are written.
        page_bytes: of each.
    """

    src: Addresses
    dst: Addresses
    page_bytes: int


def pages_of(plan: CopyPlan, page_bytes: int) -> Pages:
    """All pages of a plan between equal layouts, plane by plane.

    Raises:
        InvalidUsage: the plan copies something else than pages of ``page_bytes``.
    """
    src, dst = [], []
    for box in plan.boxes:
        if (box.outer_count, box.inner_count, box.run_bytes) != (1, 1, page_bytes):
            raise InvalidUsage(f"{box} does not copy whole pages of {page_bytes} bytes")
        planes = slice(box.first_plane, box.first_plane + box.num_planes)
        segments = plan.segments[box.first_segment : box.first_segment + box.num_segments]
        blocks = segments.astype(np.uint64)
        src.append(_placed(plan.src_planes[planes], blocks[:, 0], box.src_block_stride))
        dst.append(_placed(plan.dst_planes[planes], blocks[:, 1], box.dst_block_stride))
    return Pages(np.concatenate(src), np.concatenate(dst), page_bytes)


def _placed(planes: Addresses, blocks: Addresses, stride_bytes: int) -> Addresses:
    placed: Addresses = planes[:, None] + blocks * np.uint64(stride_bytes)
    return placed.reshape(-1)
