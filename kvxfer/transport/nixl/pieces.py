"""Pieces of a plan: what fits a staging slot, and how each side fills or empties it.

The rows of a piece lie in a slot one behind another, converted. So a side needs the piece as it is
on that side and nothing else: this half travels, in the message that speaks of the slot.
"""

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidUsage, ProtocolMismatch
from kvxfer.layout import CopyPlan
from kvxfer.layout.copy_plan import CopyBox

TABLE_BYTES = 60 << 10  # of a half: it travels in a message
_MAX_PLANES = 1024
_MAX_SEGMENTS = 4096
_MAX_SCALES = 2048
# A request is cut into this many pieces, so that gather, network and scatter overlap, unless they
# would become too short to be worth their messages.
_MIN_PIECES = 8
_LEAST_BYTES = 2 << 20
_CONVERSIONS = ("none", "bfloat16", "float16")
_HEAD = struct.Struct("<IIII")  # planes, segments, scales, conversion
_NUM_COLUMNS = len(CopyBox._fields)
_SCALE_COLUMNS = ("first_scale", "scale_plane_step", "outer_scale_step", "inner_scale_step")
_LIMIT = 1 << 62

Regions = Sequence[tuple[int, ...]]  # address, length in bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one box of a plan.

    Attributes:
        box: the part, as a box over the tables below.
        src_planes: uint64 ``[P]``; shifted where the part does not begin with its rows.
        dst_planes: the same.
        segments: uint32 ``[S, 4]``.
        scales: float32, of the conversion; else empty.
        conversion: of the plan.
    """

    box: CopyBox
    src_planes: NDArray[np.uint64]
    dst_planes: NDArray[np.uint64]
    segments: NDArray[np.uint32]
    scales: NDArray[np.float32]
    conversion: str

    @property
    def wire_run_bytes(self) -> int:
        """Bytes of a row in a slot, after the conversion."""
        return self.box.run_bytes // (1 if self.conversion == "none" else 2)

    @property
    def wire_bytes(self) -> int:
        """Bytes of all rows in a slot."""
        return self.box.num_runs * self.wire_run_bytes

    def as_plan(self) -> CopyPlan:
        """From the source to the destination."""
        return CopyPlan(
            self.src_planes,
            self.dst_planes,
            segments=self.segments,
            boxes=(self.box,),
            inverse_scales=self.scales,
            conversion=self.conversion,
        )

    def arrived(self) -> "Piece":
        """The same rows as a slot holds them: converted."""
        if self.conversion == "none":
            return self
        scales = {name: 0 for name in _SCALE_COLUMNS}
        box = self.box._replace(run_bytes=self.wire_run_bytes, **scales)
        return replace(self, box=box, scales=self.scales[:0], conversion="none")

    def gather(self, first_byte: int) -> CopyPlan:
        """From the source to a slot, at ``first_byte``."""
        box, run = self.box, self.wire_run_bytes
        page = run * box.outer_count * box.inner_count
        planes = self._packed(first_byte, page)
        packed = box._replace(
            dst_block_stride=page,
            dst_slot_stride=0,
            outer_dst_stride=run * box.inner_count,
            inner_dst_stride=run,
        )
        segments = self._counted(1)
        return CopyPlan(
            self.src_planes,
            planes,
            segments=segments,
            boxes=(packed,),
            inverse_scales=self.scales,
            conversion=self.conversion,
        )

    def scatter(self, first_byte: int) -> CopyPlan:
        """From a slot, at ``first_byte``, to the destination."""
        box, run = self.arrived().box, self.wire_run_bytes
        page = run * box.outer_count * box.inner_count
        packed = box._replace(
            src_block_stride=page,
            src_slot_stride=0,
            outer_src_stride=run * box.inner_count,
            inner_src_stride=run,
        )
        planes = self._packed(first_byte, page)
        return CopyPlan(planes, self.dst_planes, segments=self._counted(0), boxes=(packed,))

    def _packed(self, first_byte: int, page_bytes: int) -> NDArray[np.uint64]:
        step = page_bytes * self.box.num_segments
        planes: NDArray[np.uint64] = np.arange(self.box.num_planes, dtype=np.uint64)
        planes *= np.uint64(step)
        planes += np.uint64(first_byte)
        return planes

    def _counted(self, side: int) -> NDArray[np.uint32]:
        """The segments with the blocks of one side counted from 0, at slot 0."""
        segments: NDArray[np.uint32] = self.segments.copy()
        segments[:, side] = np.arange(len(segments))
        segments[:, side + 2] = 0
        return segments


def cut(plan: CopyPlan, boxes: Sequence[CopyBox], slot_bytes: int) -> Iterator[Piece]:
    """``boxes`` of ``plan`` in pieces of at most ``slot_bytes`` in a slot."""
    max_bytes = min(slot_bytes, max(plan.total_bytes // _MIN_PIECES, _LEAST_BYTES))
    for box in boxes:
        yield from _cut_box(plan, box, max_bytes)


def _cut_box(plan: CopyPlan, box: CopyBox, max_bytes: int) -> Iterator[Piece]:
    shrink = 1 if plan.conversion == "none" else 2
    runs, run = _steps(box.run_bytes, max_bytes * shrink // 64 * 64, box.run_bytes)
    unit = run // shrink
    inners, inner = _steps(box.inner_count, max_bytes // unit, box.inner_count)
    unit *= inner
    whole = inner == box.inner_count and run == box.run_bytes
    outers, outer = _steps(box.outer_count, max_bytes // unit if whole else 1, box.outer_count)
    unit *= outer
    whole = whole and outer == box.outer_count
    segments, segment = _steps(box.num_segments, max_bytes // unit if whole else 1, _MAX_SEGMENTS)
    unit *= segment
    whole = whole and segment == box.num_segments
    most = _MAX_PLANES
    if shrink > 1:
        most = max(1, min(most, _MAX_SCALES // max(box.scale_plane_step, 1)))
    planes, plane = _steps(box.num_planes, max_bytes // unit if whole else 1, most)
    axes = (
        (planes, plane, box.num_planes),
        (segments, segment, box.num_segments),
        (outers, outer, box.outer_count),
        (inners, inner, box.inner_count),
        (runs, run, box.run_bytes),
    )
    parts = ([range(at, min(at + step, end)) for at in starts] for starts, step, end in axes)
    for part in itertools.product(*parts):
        yield _part(plan, box, *part)


def _steps(count: int, fits: int, most: int) -> tuple[range, int]:
    """How an axis is cut, and how many a piece has of it."""
    step = max(1, min(count, fits, most))
    return range(0, count, step), step


def _part(
    plan: CopyPlan,
    box: CopyBox,
    planes: range,
    segments: range,
    outer: range,
    inner: range,
    run: range,
) -> Piece:
    converts = plan.conversion != "none"
    src_shift = outer.start * box.outer_src_stride + inner.start * box.inner_src_stride
    dst_shift = outer.start * box.outer_dst_stride + inner.start * box.inner_dst_stride
    src_shift += run.start
    dst_shift += run.start // (2 if converts else 1)
    at = slice(box.first_plane + planes.start, box.first_plane + planes.stop)
    first = box.first_scale + planes.start * box.scale_plane_step
    first += outer.start * box.outer_scale_step + inner.start * box.inner_scale_step
    last = first + (len(planes) - 1) * box.scale_plane_step
    last += (len(outer) - 1) * box.outer_scale_step + (len(inner) - 1) * box.inner_scale_step
    begin = box.first_segment + segments.start
    return Piece(
        box._replace(
            first_plane=0,
            num_planes=len(planes),
            first_segment=0,
            num_segments=len(segments),
            outer_count=len(outer),
            inner_count=len(inner),
            run_bytes=len(run),
            first_scale=0,
        ),
        plan.src_planes[at] + np.uint64(src_shift),
        plan.dst_planes[at] + np.uint64(dst_shift),
        plan.segments[begin : begin + len(segments)],
        plan.inverse_scales[first : last + 1] if converts else plan.inverse_scales[:0],
        plan.conversion,
    )


def encode_half(piece: Piece, *, source: bool) -> bytes:
    """One side of a piece.

    Raises:
        InvalidUsage: it is longer than a message has room for.
    """
    piece = piece if source else piece.arrived()
    planes, places = _side(piece, source)
    head = _HEAD.pack(
        planes.size, len(places), piece.scales.size, _CONVERSIONS.index(piece.conversion)
    )
    box = np.array(piece.box, np.uint64)
    data = head + b"".join(one.tobytes() for one in (planes, box, places, piece.scales))
    if len(data) > TABLE_BYTES:
        raise InvalidUsage(
            f"the tables of a piece have {len(data)} bytes, the limit is {TABLE_BYTES}; use "
            "conversions with fewer scales a plane"
        )
    return data


def _side(piece: Piece, source: bool) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """Planes, and uint32 ``[S, 2]`` of block and slot."""
    if source:
        return piece.src_planes, piece.segments[:, 0::2]
    return piece.dst_planes, piece.segments[:, 1::2]


def decode_half(data: bytes, *, source: bool) -> Piece:
    """One side of a peer's piece; the other is zeros. Where its bytes lie is not checked here.

    Raises:
        ProtocolMismatch: it is none, or its tables do not fit its box.
    """
    try:
        num_planes, num_segments, num_scales, conversion = _HEAD.unpack_from(data)
        num_longs = num_planes + _NUM_COLUMNS
        wanted = _HEAD.size + 8 * (num_longs + num_segments) + 4 * num_scales
        if wanted != len(data) or conversion >= len(_CONVERSIONS):
            raise ValueError(f"counts for {wanted} bytes, conversion {conversion}")
        longs = np.frombuffer(data, np.uint64, num_longs, _HEAD.size)
        box = CopyBox(*longs[num_planes:].tolist())
        _require_whole(box, num_planes, num_segments)
    except (struct.error, ValueError) as error:
        raise ProtocolMismatch(f"{len(data)} bytes are not half a piece: {error}") from error
    offset = _HEAD.size + longs.nbytes
    places = np.frombuffer(data, np.uint32, 2 * num_segments, offset).reshape(-1, 2)
    planes, nowhere = longs[:num_planes].copy(), np.zeros(num_planes, np.uint64)
    segments = np.zeros((num_segments, 4), np.uint32)
    segments[:, (0 if source else 1) :: 2] = places
    return Piece(
        box,
        planes if source else nowhere,
        nowhere if source else planes,
        segments,
        np.frombuffer(data, np.float32, num_scales, offset + places.nbytes).copy(),
        _CONVERSIONS[conversion],
    )


def _require_whole(box: CopyBox, num_planes: int, num_segments: int) -> None:
    covers = (box.first_plane, box.num_planes, box.first_segment, box.num_segments)
    if covers != (0, num_planes, 0, num_segments):
        raise ValueError(f"a box of {covers} over {num_planes} planes, {num_segments} segments")
    if min(num_planes, num_segments, box.outer_count, box.inner_count, box.run_bytes) < 1:
        raise ValueError("a box without rows")


def is_inside(plan: CopyPlan, box: CopyBox, *, source: bool, regions: Regions) -> bool:
    """Whether every byte of one side of a box lies in one of ``regions``.

    Indices beyond the tables are found by the core, before anything is copied.
    """
    if not (box.num_planes and box.num_segments):
        return True
    extent = _extent(plan, box, source)
    if extent is None:
        return False
    table = plan.src_planes if source else plan.dst_planes
    planes = table[box.first_plane : box.first_plane + box.num_planes]
    inside = np.zeros(planes.size, bool)
    for address, num_bytes, *_ in regions:
        if extent <= num_bytes:
            begin, last = np.uint64(address), np.uint64(address + num_bytes - extent)
            inside |= (planes >= begin) & (planes <= last)
    return bool(inside.all())


def _extent(plan: CopyPlan, box: CopyBox, source: bool) -> int | None:
    """Bytes from a plane's address to the end of its furthest row; None where there is no such."""
    side, name = (0, "src") if source else (1, "dst")
    block_stride, slot_stride, outer_stride, inner_stride = (
        int(getattr(box, field))
        for field in (
            f"{name}_block_stride",
            f"{name}_slot_stride",
            f"outer_{name}_stride",
            f"inner_{name}_stride",
        )
    )
    segments = plan.segments[box.first_segment : box.first_segment + box.num_segments]
    if not segments.size or min(box.outer_count, box.inner_count, box.run_bytes) < 1:
        return None
    blocks, slots = (segments[:, side + at].astype(np.uint64) for at in (0, 2))
    if int(blocks.max()) * block_stride + int(slots.max()) * slot_stride > _LIMIT:
        return None
    furthest = blocks * np.uint64(block_stride) + slots * np.uint64(slot_stride)
    run_bytes = box.run_bytes
    if not source and plan.conversion != "none":
        run_bytes //= 2
    extent = int(furthest.max()) + run_bytes
    extent += (box.outer_count - 1) * outer_stride + (box.inner_count - 1) * inner_stride
    return extent if extent <= _LIMIT else None


def runs_of(plan: CopyPlan, box: CopyBox, *, source: bool) -> NDArray[np.uint64]:
    """The address of every row of a box on one side, uint64 ``[num_runs]``."""
    side, name = (0, "src") if source else (1, "dst")
    table = plan.src_planes if source else plan.dst_planes
    planes = table[box.first_plane : box.first_plane + box.num_planes]
    segments = plan.segments[box.first_segment : box.first_segment + box.num_segments]
    axes = [
        segments[:, side] * np.uint64(getattr(box, f"{name}_block_stride"))
        + segments[:, side + 2] * np.uint64(getattr(box, f"{name}_slot_stride"))
    ]
    for axis in ("outer", "inner"):
        count = np.arange(getattr(box, f"{axis}_count"), dtype=np.uint64)
        axes.append(count * np.uint64(getattr(box, f"{axis}_{name}_stride")))
    runs = planes
    for places in axes:
        runs = np.add.outer(runs, places)
    return runs.reshape(-1)
