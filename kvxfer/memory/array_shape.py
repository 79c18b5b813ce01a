"""Whether the shape and item size that an array says of itself fit the layout of a cache."""

import math
from collections.abc import Sequence
from typing import Any

from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout


def require_fitting(
    layout: KVLayout, array: Any, num_bytes: int, *, num_arrays: int, num_blocks: int
) -> None:
    """Check an array of two axes or more; one of one axis, or without a shape, is raw bytes.

    Neighbouring axes may be one (``head * head_dim``, K and V of a head side by side), and axes of
    length 1 may be there or not.

    Args:
        layout: this rank's part.
        array: one of ``num_arrays`` equal arrays, each of whole layers or planes.
        num_bytes: its bytes.
        num_arrays: arrays of the cache.
        num_blocks: blocks of the cache.

    Raises:
        InvalidUsage: elements of another size, or axes in another order or of other lengths.
    """
    shape = tuple(getattr(array, "shape", ()))
    if len(shape) < 2:
        return
    itemsize = num_bytes // math.prod(shape)
    if itemsize not in (1, layout.itemsize_bytes):
        raise InvalidUsage(
            f"an array of elements of {itemsize} bytes for a cache of {layout.dtype}, of "
            f"{layout.itemsize_bytes}; give the array of the cache, or a flat one of its bytes"
        )
    names, sizes = _axes(layout, num_arrays, num_blocks)
    wanted = [*sizes, layout.head_dim * layout.itemsize_bytes // itemsize]
    if not _merges(wanted, shape):
        axes = ", ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
        raise InvalidUsage(
            f"an array of shape {shape} is no cache of ({axes}, element {wanted[-1]}) in this "
            "order; check order, kv, rank and block_size, or pass a flat array of bytes"
        )


def _axes(layout: KVLayout, num_arrays: int, num_blocks: int) -> tuple[list[str], list[int]]:
    sizes = layout.axis_sizes(num_blocks)
    left = num_arrays
    for axis in layout.axes[:2]:  # arrays are cut along the slowest axes
        if left == 1:
            break
        left //= sizes[axis]
        sizes[axis] = 1
    names = [axis for axis in layout.axes if sizes[axis] > 1]
    return names, [sizes[axis] for axis in names]


def _merges(fine: Sequence[int], coarse: Sequence[int]) -> bool:
    """Whether ``coarse`` is ``fine`` with some neighbouring axes taken together."""
    rest = iter(size for size in fine if size > 1)
    for size in coarse:
        product = 1
        while product < size:
            product *= next(rest, 0) or size + 1
        if product != size:
            return False
    return next(rest, None) is None
