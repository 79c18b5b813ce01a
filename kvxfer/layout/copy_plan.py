"""A copy as tables: what `csrc/copy/copy_plan.hpp` walks."""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidUsage
from kvxfer.layout import _checks


class CopyBox(NamedTuple):
    """A strided box: planes x segments x outer rows x inner rows, each a run of contiguous bytes.

    The columns of the core's table of boxes, in its order. Strides are in bytes; ``run_bytes``
    counts bytes read, of which a conversion writes half. Row (o, i) of plane p and segment s uses
    the scale ``first_scale + p * scale_plane_step + o * outer_scale_step + i * inner_scale_step``.
    """

    first_plane: int
    num_planes: int
    first_segment: int
    num_segments: int
    src_block_stride: int
    dst_block_stride: int
    src_slot_stride: int
    dst_slot_stride: int
    outer_count: int
    outer_src_stride: int
    outer_dst_stride: int
    inner_count: int
    inner_src_stride: int
    inner_dst_stride: int
    run_bytes: int
    first_scale: int = 0
    scale_plane_step: int = 0
    outer_scale_step: int = 0
    inner_scale_step: int = 0

    @property
    def num_pages(self) -> int:
        """Pages: planes times segments."""
        return self.num_planes * self.num_segments

    @property
    def num_runs(self) -> int:
        """Contiguous runs."""
        return self.num_pages * self.outer_count * self.inner_count

    @property
    def num_bytes(self) -> int:
        """Bytes read."""
        return self.num_runs * self.run_bytes


# Made once: every plan is checked, one a layer where layers are sent as they become ready.
_UINT64, _UINT32, _FLOAT32 = np.dtype(np.uint64), np.dtype(np.uint32), np.dtype(np.float32)


def _no_scales() -> NDArray[np.float32]:
    return np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """What to copy: base addresses of planes, segments of tokens, and boxes that combine them.

    Its size grows with planes + segments, not with their product. Compared by identity.

    Args:
        src_planes: uint64 ``[num_planes]``, addresses.
        dst_planes: uint64 ``[num_planes]``, addresses.
        segments: uint32 ``[num_segments, 4]``: source block, destination block, source slot,
            destination slot.
        boxes: what is copied; no byte is written twice.
        inverse_scales: float32 ``[n]``, what converted elements are multiplied by; else empty.
        conversion: ``none``, or the dtype of the source where elements become fp8 (e4m3).

    Raises:
        InvalidUsage: an array of another dtype or shape, or not contiguous.
    """

    src_planes: NDArray[np.uint64]
    dst_planes: NDArray[np.uint64]
    _: KW_ONLY
    segments: NDArray[np.uint32]
    boxes: tuple[CopyBox, ...]
    inverse_scales: NDArray[np.float32] = field(default_factory=_no_scales)
    conversion: str = "none"

    def __post_init__(self) -> None:
        _check_table("src_planes", self.src_planes, _UINT64, (None,))
        _check_table("dst_planes", self.dst_planes, _UINT64, (self.src_planes.size,))
        _check_table("segments", self.segments, _UINT32, (None, 4))
        _check_table("inverse_scales", self.inverse_scales, _FLOAT32, (None,))

    @classmethod
    def contiguous(cls, src_address: int, dst_address: int, num_bytes: int) -> "CopyPlan":
        """One range, of one byte or more.

        Raises:
            InvalidUsage: no bytes, or more than an address space has.
        """
        limit = _checks.ADDRESS_SPACE_BYTES - 1
        run_bytes = _checks.integer("num_bytes", num_bytes, minimum=1, maximum=limit)
        return cls(
            np.array([src_address], dtype=np.uint64),
            np.array([dst_address], dtype=np.uint64),
            segments=np.zeros((1, 4), dtype=np.uint32),
            boxes=(CopyBox(0, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, run_bytes),),
        )

    @property
    def num_pages(self) -> int:
        """Pages (a plane's part of one segment) over all boxes."""
        return sum(box.num_pages for box in self.boxes)

    @property
    def num_runs(self) -> int:
        """Contiguous runs over all boxes."""
        return sum(box.num_runs for box in self.boxes)

    @property
    def total_bytes(self) -> int:
        """Bytes written."""
        read_bytes = sum(box.num_bytes for box in self.boxes)
        return read_bytes if self.conversion == "none" else read_bytes // 2

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables together."""
        tables = (self.src_planes, self.dst_planes, self.segments, self.inverse_scales)
        return sum(table.nbytes for table in tables) + 8 * len(CopyBox._fields) * len(self.boxes)

    def box_table(self) -> NDArray[np.uint64]:
        """The boxes as the core takes them, uint64 ``[num_boxes, 19]``."""
        return np.array(self.boxes, dtype=np.uint64).reshape(len(self.boxes), len(CopyBox._fields))


def _check_table(
    name: str, table: object, dtype: np.dtype[Any], shape: tuple[int | None, ...]
) -> None:
    fits = (
        isinstance(table, np.ndarray)
        and table.dtype == dtype
        and table.ndim == len(shape)
        and all(want in (None, have) for want, have in zip(shape, table.shape, strict=True))
        and table.flags.c_contiguous
    )
    if not fits:
        found = (
            f"{table.dtype} of shape {table.shape}"
            if isinstance(table, np.ndarray)
            else type(table).__name__
        )
        wanted = ", ".join("n" if want is None else str(want) for want in shape)
        raise InvalidUsage(f"{name} is {found}; use a contiguous {dtype} array of shape [{wanted}]")
