"""Plans cut into pieces for the slots of `nixl`: the same bytes, and nothing outside regions."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from carry_out import runs
from host_copies import pool
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer import _core
from kvxfer.errors import InvalidUsage, ProtocolMismatch
from kvxfer.layout import CopyPlan
from kvxfer.layout.copy_plan import CopyBox
from kvxfer.transport.host_copy import plan_tables
from kvxfer.transport.nixl import pieces, wire

MEMORY_BYTES = 1 << 20
TINY_SLOT_BYTES = 256


class Case:
    """A plan of one random box between two memories."""

    def __init__(self, seed: int, conversion: str) -> None:
        random = np.random.default_rng(seed)
        planes, segments, outer, inner = (int(random.integers(1, 6)) for _ in range(4))
        run = 2 * int(random.integers(1, 400))
        written = run if conversion == "none" else run // 2
        self.source = random.integers(0, 255, MEMORY_BYTES, np.uint8)
        self.target = np.zeros(MEMORY_BYTES, np.uint8)
        if conversion != "none":
            values = random.standard_normal(MEMORY_BYTES // 2).astype(np.float32)
            self.source = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        scales = planes * outer if conversion != "none" else 0
        inner_dst, outer_dst = written + 2, (written + 2) * inner
        table = np.zeros((segments + 1, 4), np.uint32)
        table[:, 0] = random.permutation(segments + 1)
        table[:, 1] = random.permutation(segments + 1)
        table[:, 2] = random.integers(0, 2, segments + 1)
        self.plan = CopyPlan(
            np.uint64(self.source.ctypes.data)
            + random.integers(0, 99, planes).astype(np.uint64) * 2,
            np.uint64(self.target.ctypes.data)
            + np.arange(planes, dtype=np.uint64) * np.uint64(outer_dst * outer * (segments + 1)),
            segments=table,
            boxes=(
                CopyBox(
                    *(0, planes, 1, segments, run * 3, outer_dst * outer, 2, 1),
                    *(outer, run * 2, outer_dst, inner, run, inner_dst, run),
                    *((0, outer, 1, 0) if scales else ()),
                ),
            ),
            inverse_scales=random.random(scales).astype(np.float32) + 0.5,
            conversion=conversion,
        )

    def expected(self) -> NDArray[np.uint8]:
        run(self.plan)
        found = self.target.copy()
        self.target[:] = 0
        return found


def run(plan: CopyPlan) -> None:
    _core.paged_copy_host(pool(1), plan_tables(plan), False)


def sent(piece: pieces.Piece, *, source: bool) -> pieces.Piece:
    """Half a piece as the far side reads it."""
    return pieces.decode_half(pieces.encode_half(piece, source=source), source=source)


@settings(max_examples=150)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from(["none", "bfloat16"]),
    st.sampled_from([TINY_SLOT_BYTES, 5000, 1 << 20]),
)
def test_pieces_move_what_the_plan_moves(seed: int, conversion: str, max_bytes: int) -> None:
    case = Case(seed, conversion)
    expected = case.expected()
    num_bytes = 0
    for piece in pieces.cut(case.plan, case.plan.boxes, max_bytes):
        assert piece.wire_bytes <= max_bytes
        slot = np.zeros(piece.wire_bytes, np.uint8)
        run(sent(piece, source=True).gather(slot.ctypes.data))
        run(sent(piece, source=False).scatter(slot.ctypes.data))
        num_bytes += piece.wire_bytes
    assert np.array_equal(case.target, expected)
    assert num_bytes == case.plan.total_bytes


def test_a_piece_that_is_left_out_is_seen() -> None:
    case = Case(7, "none")
    expected = case.expected()
    cut = list(pieces.cut(case.plan, case.plan.boxes, TINY_SLOT_BYTES))
    for piece in cut[1:]:
        slot = np.zeros(piece.wire_bytes, np.uint8)
        run(piece.gather(slot.ctypes.data))
        run(piece.scatter(slot.ctypes.data))
    assert len(cut) > 1
    assert not np.array_equal(case.target, expected)


@settings(max_examples=50)
@given(st.integers(0, 1 << 32), st.booleans())
def test_a_box_is_inside_to_its_last_byte_and_no_further(seed: int, source: bool) -> None:
    plan = Case(seed, "none").plan
    box = plan.boxes[0]
    src, dst = runs(plan, box)
    rows = (src if source else dst).reshape(-1).astype(np.uint64)
    assert np.array_equal(np.sort(pieces.runs_of(plan, box, source=source)), np.sort(rows))
    begin, end = int(rows.min()), int(rows.max()) + box.run_bytes
    table = plan.src_planes if source else plan.dst_planes
    begin = min(begin, int(table.min()))  # a plane's own address counts, though no row is there
    assert pieces.is_inside(plan, box, source=source, regions=[(begin, end - begin)])
    assert not pieces.is_inside(plan, box, source=source, regions=[(begin, end - begin - 1)])
    assert not pieces.is_inside(plan, box, source=source, regions=[(begin + 1, end - begin - 1)])
    assert not pieces.is_inside(plan, box, source=source, regions=[])


BAD_FIELDS = {
    "a stride that wraps": {"dst_block_stride": (1 << 64) - 1},
    "an outer stride that wraps": {"outer_dst_stride": (1 << 64) - 4096, "outer_count": 3},
    "rows without end": {"inner_count": 1 << 32, "inner_dst_stride": 1 << 32},
    "no rows": {"outer_count": 0},
    "a run without end": {"run_bytes": (1 << 64) - 1},
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_boxes_that_reach_beyond_memory_are_not_inside(name: str) -> None:
    plan = Case(3, "none").plan
    plan.segments[:, 1] += 1  # of block 0 no stride matters
    fields: dict[str, Any] = BAD_FIELDS[name]
    box = plan.boxes[0]._replace(**fields)
    everything = [(1, (1 << 62) - 1)]
    assert pieces.is_inside(plan, plan.boxes[0], source=False, regions=everything)
    assert not pieces.is_inside(plan, box, source=False, regions=everything)


def whole_piece(seed: int, conversion: str) -> pieces.Piece:
    """One random box in one piece."""
    plan = Case(seed, conversion).plan
    (piece,) = pieces.cut(plan, plan.boxes, 1 << 30)
    return piece


@pytest.mark.parametrize("source", [True, False])
def test_halves_of_other_lengths_are_refused(source: bool) -> None:
    data = pieces.encode_half(whole_piece(3, "bfloat16"), source=source)
    for wrong in (b"", data[:10], data[:-1], data + b"\0", b"\xff" * len(data)):
        with pytest.raises(ProtocolMismatch, match="are not half a piece"):
            pieces.decode_half(wrong, source=source)
    head = data[:12] + b"\x07" + data[13:]
    with pytest.raises(ProtocolMismatch, match="conversion 7"):
        pieces.decode_half(head, source=source)


BAD_BOXES = {
    "planes that are not there": {"num_planes": 99},
    "segments that are not there": {"num_segments": 1 << 40},
    "a part of the planes": {"first_plane": 1},
    "a part of the segments": {"first_segment": 1 << 62},
    "no rows": {"inner_count": 0},
    "empty rows": {"run_bytes": 0},
}


@pytest.mark.parametrize("name", BAD_BOXES)
def test_a_half_whose_box_does_not_fit_its_tables_is_refused(name: str) -> None:
    piece = whole_piece(3, "none")
    fields: dict[str, Any] = BAD_BOXES[name]
    wrong = replace(piece, box=piece.box._replace(**fields))
    data = pieces.encode_half(wrong, source=True)
    with pytest.raises(ProtocolMismatch, match="are not half a piece: a box"):
        pieces.decode_half(data, source=True)


def test_scales_beyond_their_table_are_refused_by_the_core() -> None:
    piece = whole_piece(3, "bfloat16")
    wrong = replace(piece, box=piece.box._replace(first_scale=1 << 20))
    slot = np.zeros(piece.wire_bytes, np.uint8)
    with pytest.raises(InvalidUsage, match="scale"):
        run(sent(wrong, source=True).gather(slot.ctypes.data))


def test_halves_of_the_longest_pieces_fit_a_message() -> None:
    num_planes, num_segments = 1500, 9000
    page_bytes = 64
    plan = CopyPlan(
        np.zeros(num_planes, np.uint64),
        np.zeros(num_planes, np.uint64),
        segments=np.zeros((num_segments, 4), np.uint32),
        boxes=(
            CopyBox(
                *(0, num_planes, 0, num_segments, page_bytes, page_bytes // 2, 0, 0),
                *(2, 32, 16, 1, 0, 0, 32, 0, 2, 1, 0),
            ),
        ),
        inverse_scales=np.ones(2 * num_planes, np.float32),
        conversion="bfloat16",
    )
    total = 0
    for piece in pieces.cut(plan, plan.boxes, 1 << 30):
        for source in (True, False):
            assert len(pieces.encode_half(piece, source=source)) <= pieces.TABLE_BYTES
        total += piece.wire_bytes
    assert total == plan.total_bytes
    assert pieces.TABLE_BYTES < wire.MAX_MESSAGE_BYTES


def test_indices_beyond_the_tables_are_refused_by_the_core() -> None:
    plan = Case(3, "none").plan
    for fields in ({"num_planes": 99}, {"first_segment": 1 << 31}):
        box = plan.boxes[0]._replace(**fields)
        wrong = CopyPlan(plan.src_planes, plan.dst_planes, segments=plan.segments, boxes=(box,))
        with pytest.raises(InvalidUsage, match="of a table of"):
            run(wrong)
