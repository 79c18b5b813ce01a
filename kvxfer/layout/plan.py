"""From two views and two block tables to the tables that a copy walks.

The plan never lists pages: it holds one address a plane and one offset a block, and whoever copies
adds them. Its size grows with planes + blocks, not with their product.
"""

import threading
from array import array
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidUsage, LayoutMismatch
from kvxfer.layout import _checks
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.layout.view import KVView

BlockIds: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]

# Up to this span of ids (16 MiB of owners) a table beats a sort; above it page faults cost more.
_MAX_OWNERS = 1 << 22
_THREAD = threading.local()
_BOOLEANS = (bool, np.bool_)
# numpy before 2.3 only warns of its bool as an integer; where warnings are errors that is raised.
_NOT_INT64 = (TypeError, OverflowError, DeprecationWarning)


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """What to copy: page (p, b) goes from ``src_planes[p] + src_offsets[b]`` to that sum of dst.

    The Python twin of ``csrc/copy/copy_plan.hpp``. Compared by identity.

    Args:
        src_planes: uint64 ``[num_planes]``, addresses.
        dst_planes: uint64 ``[num_planes]``, addresses.
        src_offsets: uint64 ``[num_blocks]``, bytes from the start of a plane.
        dst_offsets: uint64 ``[num_blocks]``, bytes from the start of a plane.
        page_bytes: bytes of one page, 1 or more.

    Raises:
        InvalidUsage: an array is not contiguous uint64 of one dimension, or lengths differ.
    """

    src_planes: NDArray[np.uint64]
    dst_planes: NDArray[np.uint64]
    _: KW_ONLY
    src_offsets: NDArray[np.uint64]
    dst_offsets: NDArray[np.uint64]
    page_bytes: int

    def __post_init__(self) -> None:
        for name in ("planes", "offsets"):
            src, dst = getattr(self, f"src_{name}"), getattr(self, f"dst_{name}")
            _check_table(f"src_{name}", src)
            _check_table(f"dst_{name}", dst)
            if src.size != dst.size:
                raise InvalidUsage(
                    f"src_{name} has {src.size} entries and dst_{name} {dst.size}; use equal "
                    "lengths"
                )
        limit = _checks.ADDRESS_SPACE_BYTES - 1
        page_bytes = _checks.integer("page_bytes", self.page_bytes, minimum=1, maximum=limit)
        object.__setattr__(self, "page_bytes", page_bytes)

    @property
    def num_pages(self) -> int:
        """Pages to copy."""
        return self.src_planes.size * self.src_offsets.size

    @property
    def total_bytes(self) -> int:
        """Bytes to copy."""
        return self.num_pages * self.page_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the four tables together."""
        tables = (self.src_planes, self.dst_planes, self.src_offsets, self.dst_offsets)
        return sum(table.nbytes for table in tables)


def plan(src: KVView, dst: KVView, src_block_ids: BlockIds, dst_block_ids: BlockIds) -> CopyPlan:
    """Plan the copy of block ``src_block_ids[i]`` to block ``dst_block_ids[i]`` in every plane.

    Args:
        src: the cache that is read.
        dst: the cache that is written; its layout equals that of ``src``, its stride and number of
            blocks may differ.
        src_block_ids: integers ``[num_blocks]`` in 0 .. ``src.num_blocks`` - 1, repeats allowed.
        dst_block_ids: integers ``[num_blocks]`` in 0 .. ``dst.num_blocks`` - 1, each once.

    Returns:
        The plan; its offset tables are read-only. Two empty lists give a plan of 0 pages.

    Raises:
        LayoutMismatch: the layouts differ; names the first field that does.
        InvalidUsage: ids of another type or shape, outside their view, of unequal number, or a
            destination named twice.
    """
    _require_equal_layouts(src.layout, dst.layout)
    src_ids = _checked_ids("src_block_ids", src_block_ids, num_blocks=src.num_blocks)
    dst_ids = _checked_ids("dst_block_ids", dst_block_ids, num_blocks=dst.num_blocks)
    if src_ids.size != dst_ids.size:
        raise InvalidUsage(
            f"src_block_ids has {src_ids.size} entries and dst_block_ids {dst_ids.size}; give one "
            "destination for each source"
        )
    _refuse_duplicates("dst_block_ids", dst_ids)
    return CopyPlan(
        src.plane_addresses,
        dst.plane_addresses,
        src_offsets=_offsets(src_ids, src.block_stride_bytes),
        dst_offsets=_offsets(dst_ids, dst.block_stride_bytes),
        page_bytes=src.layout.page_bytes,
    )


def _require_equal_layouts(src: KVLayout, dst: KVLayout) -> None:
    if src == dst:
        return
    for field in fields(KVLayout):
        src_value, dst_value = getattr(src, field.name), getattr(dst, field.name)
        if src_value != dst_value:
            src_text, dst_text = (getattr(v, "value", v) for v in (src_value, dst_value))
            raise LayoutMismatch(
                f"{field.name} is {src_text} at the source and {dst_text} at the destination; "
                "give both sides the same layout"
            )


def _checked_ids(name: str, ids: BlockIds, *, num_blocks: int) -> NDArray[np.uint64]:
    values = ids if isinstance(ids, np.ndarray) else _as_array(name, ids)
    if values.ndim != 1:
        raise InvalidUsage(f"{name} has shape {values.shape}; use one dimension")
    if values.dtype.kind not in "iu":
        raise InvalidUsage(f"{name} has dtype {values.dtype}; use integers of at most 64 bits")
    # Sign extension makes a negative id huge, so that one comparison holds both limits.
    unsigned = values.astype(np.uint64)
    if unsigned.size and unsigned.max() >= num_blocks:
        position = int(np.argmax(unsigned >= num_blocks))
        raise InvalidUsage(
            f"{name}[{position}] is {int(values[position])}; this view has {num_blocks} blocks, so "
            f"use 0 .. {num_blocks - 1}"
        )
    return unsigned


def _as_array(name: str, ids: Sequence[int]) -> NDArray[Any]:
    if not isinstance(ids, (list, tuple)):
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


def _refuse_duplicates(name: str, ids: NDArray[np.uint64]) -> None:
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


def _offsets(ids: NDArray[np.uint64], stride_bytes: int) -> NDArray[np.uint64]:
    # Cannot overflow: the view has checked that its last page ends inside the address space.
    offsets: NDArray[np.uint64] = ids * np.uint64(stride_bytes)
    offsets.setflags(write=False)
    return offsets


def _check_table(name: str, table: object) -> None:
    if (
        not isinstance(table, np.ndarray)
        or table.dtype != np.uint64
        or table.ndim != 1
        or not table.flags.c_contiguous
    ):
        found = (
            f"{table.dtype} of shape {table.shape}"
            if isinstance(table, np.ndarray)
            else type(table).__name__
        )
        raise InvalidUsage(f"{name} is {found}; use a contiguous uint64 array of one dimension")
