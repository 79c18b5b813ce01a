"""Checks of the block ids that engines hand out, fast enough for tables of thousands."""

import threading
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidUsage

BlockIds: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]

# Up to this span of ids (16 MiB of owners) a table beats a sort; above it page faults cost more.
_MAX_OWNERS = 1 << 22
_THREAD = threading.local()
_MAX_INT64 = (1 << 63) - 1
_BOOLEANS = (bool, np.bool_)
# numpy before 2.3 only warns of its bool as an integer; where warnings are errors that is raised.
_NOT_INT64 = (TypeError, OverflowError, DeprecationWarning)


def checked_ids(name: str, ids: BlockIds) -> NDArray[np.uint64]:
    """Return ``ids`` as uint64 ``[num_blocks]``; a negative one becomes huge.

    Raises:
        InvalidUsage: another shape, or no integers of at most 64 bits.
    """
    values = ids if isinstance(ids, np.ndarray) else _as_array(name, ids)
    if values.ndim != 1:
        raise InvalidUsage(f"{name} has shape {values.shape}; use one dimension")
    if values.dtype.kind not in "iu":
        raise InvalidUsage(f"{name} has dtype {values.dtype}; use integers of at most 64 bits")
    if values.dtype == np.uint64 and values.size and values.max() > _MAX_INT64:
        position = int(np.argmax(values > _MAX_INT64))
        raise InvalidUsage(
            f"{name}[{position}] is {values[position]}; a block id is at most {_MAX_INT64}"
        )
    # Sign extension makes a negative id huge, so that one comparison holds both limits.
    return values.astype(np.uint64)


def require_within(name: str, ids: NDArray[np.uint64], num_blocks: int) -> None:
    """Check that every id is a block of a cache of ``num_blocks``.

    Raises:
        InvalidUsage: names the first that is not.
    """
    if ids.size and ids.max() >= num_blocks:
        position = int(np.argmax(ids >= num_blocks))
        raise InvalidUsage(
            f"{name}[{position}] is {int(ids.view(np.int64)[position])}; this view has "
            f"{num_blocks} blocks, so use 0 .. {num_blocks - 1}"
        )


def _as_array(name: str, ids: Sequence[int]) -> NDArray[Any]:
    if not isinstance(ids, (list, tuple, range)):
        return np.asarray(ids)
    try:
        # Refuses floats, which numpy would round, and is faster than numpy at this.
        values = np.asarray(array("q", ids))
    except _NOT_INT64:
        bad = next((i for i, value in enumerate(ids) if not _is_int64(value)), 0)
        raise _not_an_id(name, bad, ids[bad]) from None
    # A bool has become 0 or 1 without a word; looking at those alone is cheaper than at all.
    for position in np.flatnonzero(values.view(np.uint64) < 2).tolist():
        if isinstance(ids[position], _BOOLEANS):
            raise _not_an_id(name, position, ids[position])
    return values


def _is_int64(value: Any) -> bool:
    try:
        array("q", [value])
    except _NOT_INT64:
        return False
    return True


def _not_an_id(name: str, position: int, value: object) -> InvalidUsage:
    return InvalidUsage(
        f"{name}[{position}] is {value!r} ({type(value).__name__}); use integers of at most 64 bits"
    )


def refuse_duplicates(name: str, ids: NDArray[np.uint64]) -> None:
    """Check that no block is named twice.

    Raises:
        InvalidUsage: names the first that is.
    """
    if ids.size < 2 or _all_distinct(ids.view(np.int64)):
        return
    seen: dict[int, int] = {}
    for position, block_id in enumerate(ids.tolist()):
        first = seen.setdefault(block_id, position)
        if first != position:
            raise InvalidUsage(
                f"{name}[{first}] and {name}[{position}] are both {block_id}; two blocks cannot be "
                "written to one place, so name each destination once"
            )


def _all_distinct(ids: NDArray[np.int64]) -> bool:
    span = int(ids.max()) + 1
    if span > _MAX_OWNERS:
        ordered = np.sort(ids)
        return not bool((ordered[1:] == ordered[:-1]).any())
    # Every id is owned by the last position that names it. Only what is written here is read, so
    # the table needs no clearing, which would cost as much as it has entries.
    owners = _scratch(span)
    positions = np.arange(ids.size, dtype=np.uint32)
    owners[ids] = positions
    return bool((owners[ids] == positions).all())


def _scratch(num_entries: int) -> NDArray[np.uint32]:
    """This thread's table of owners, kept: fresh pages would cost more than the check."""
    owners: NDArray[np.uint32] | None = getattr(_THREAD, "owners", None)
    if owners is None or owners.size < num_entries:
        owners = _THREAD.owners = np.empty(num_entries, dtype=np.uint32)
    return owners
