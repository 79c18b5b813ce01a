"""Shared segments as arrays, and the way back from an address to its segment."""

import math
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer import _core
from kvxfer.errors import InvalidUsage

# Segments of this process by first address. Weak: an entry goes with the last array over it.
_LIVE: "weakref.WeakValueDictionary[int, _core.SharedSegment]" = weakref.WeakValueDictionary()


def create_segment(num_bytes: int) -> _core.SharedSegment:
    """A new zeroed segment that :func:`find_segment` knows.

    Raises:
        InvalidUsage: zero or an absurd number of bytes.
        SystemCallError: the host refuses the memory.
    """
    segment = _core.SharedSegment.create(num_bytes)
    _LIVE[segment.address] = segment
    return segment


def shared_empty(shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.uint8) -> Any:
    """A zeroed numpy array in a shared segment of its own, which peers on this host can map.

    The segment lives as long as the array or any view of it.

    Raises:
        InvalidUsage: a negative length, or an absurd number of bytes.
        SystemCallError: the host refuses the memory.
    """
    wanted = np.dtype(dtype)
    lengths = np.atleast_1d(shape).tolist()
    if any(length < 0 for length in lengths):
        raise InvalidUsage(f"a shared array of shape {lengths}; use lengths of 0 or more")
    count = math.prod(lengths)
    segment = create_segment(max(count * wanted.itemsize, 1))
    return np.frombuffer(segment, dtype=wanted, count=count).reshape(shape)  # type: ignore[call-overload]


def find_segment(address: int, num_bytes: int) -> tuple[_core.SharedSegment, int] | None:
    """The segment of this process that holds the whole range, and the range's offset in it."""
    for segment in list(_LIVE.values()):
        offset = address - segment.address
        if offset >= 0 and offset + num_bytes <= segment.num_bytes:
            return segment, offset
    return None
