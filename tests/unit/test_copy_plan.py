"""CopyPlan: its tables, its counts, and the walker that the other tests stand on."""

import dataclasses

import numpy as np
import pytest
from carry_out import carry_out

from kvxfer.errors import InvalidUsage
from kvxfer.layout import CopyBox, CopyPlan

BOX = CopyBox(0, 2, 0, 3, 8, 16, 2, 4, 2, 100, 200, 1, 0, 0, 2)
SEGMENTS = np.array([[0, 2, 0, 0], [1, 1, 1, 1], [2, 0, 0, 1]], np.uint32)


def plan(**changes: object) -> CopyPlan:
    fields: dict[str, object] = {
        "src_planes": np.array([0, 300], np.uint64),
        "dst_planes": np.array([1000, 2000], np.uint64),
        "segments": SEGMENTS,
        "boxes": (BOX,),
    }
    return CopyPlan(**fields | changes)  # type: ignore[arg-type]


def test_counts() -> None:
    made = plan(boxes=(BOX, BOX._replace(num_planes=1, first_segment=2, num_segments=1)))
    assert made.num_pages == 2 * 3 + 1
    assert made.num_runs == 2 * made.num_pages
    assert made.total_bytes == 2 * made.num_runs
    assert made.table_bytes == 2 * 2 * 8 + 3 * 4 * 4 + 2 * 19 * 8
    assert made.box_table().shape == (2, 19)
    assert made.box_table().dtype == np.uint64
    assert made.box_table()[0].tolist() == list(BOX)


def test_a_conversion_writes_half_of_what_it_reads() -> None:
    made = plan(conversion="bfloat16", inverse_scales=np.ones(5, np.float32))
    assert made.total_bytes == plan().total_bytes // 2
    assert made.table_bytes == plan().table_bytes + 5 * 4


def test_a_plan_of_nothing() -> None:
    made = plan(boxes=())
    assert (made.num_pages, made.num_runs, made.total_bytes) == (0, 0, 0)
    assert made.box_table().shape == (0, 19)


def test_contiguous_is_one_run() -> None:
    made = CopyPlan.contiguous(1 << 63, 5, 1 << 40)
    assert (made.num_pages, made.num_runs, made.total_bytes) == (1, 1, 1 << 40)
    assert (int(made.src_planes[0]), int(made.dst_planes[0])) == (1 << 63, 5)
    memory = np.arange(100, dtype=np.uint8)
    assert carry_out(CopyPlan.contiguous(10, 50, 7), memory).tolist() == [*range(50, 57)]
    assert memory[50:57].tolist() == [*range(10, 17)]


@pytest.mark.parametrize("num_bytes", [0, -1, 1 << 64, 1.0])
def test_contiguous_needs_bytes(num_bytes: int) -> None:
    with pytest.raises(InvalidUsage, match="num_bytes is"):
        CopyPlan.contiguous(0, 0, num_bytes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src_planes": [0, 1]}, "src_planes is list; use a contiguous uint64 array of shape"),
        ({"src_planes": np.zeros(2, np.int64)}, r"src_planes is int64 of shape \(2,\)"),
        ({"src_planes": np.zeros(4, np.uint64)[::2]}, "src_planes is uint64 .* use a contiguous"),
        ({"dst_planes": np.zeros(3, np.uint64)}, r"dst_planes is .*\(3,\); use .* of shape \[2\]"),
        ({"segments": np.zeros((3, 3), np.uint32)}, r"segments is .*; use .* of shape \[n, 4\]"),
        ({"segments": np.zeros((3, 4), np.int32)}, "segments is int32"),
        ({"segments": np.zeros((4, 3), np.uint32).T}, "use a contiguous uint32 array"),
        ({"inverse_scales": np.zeros(3)}, "inverse_scales is float64"),
    ],
)
def test_wrong_tables_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        dataclasses.replace(plan(), **changes)


# The walker.


def test_carry_out_by_hand() -> None:
    memory = np.zeros(3000, np.uint8)
    memory[:600] = 1 + np.arange(600) % 251
    before = memory.copy()
    written = carry_out(plan(), memory)
    assert len(written) == plan().total_bytes
    expected = before.copy()
    for src_plane, dst_plane in ((0, 1000), (300, 2000)):
        for src_block, dst_block, src_slot, dst_slot in SEGMENTS.tolist():
            for row in range(2):
                src = src_plane + src_block * 8 + src_slot * 2 + row * 100
                dst = dst_plane + dst_block * 16 + dst_slot * 4 + row * 200
                expected[dst : dst + 2] = before[src : src + 2]
    assert np.array_equal(memory, expected)
    assert np.array_equal(np.sort(written), np.flatnonzero(memory != before))


def test_carry_out_reads_before_it_writes() -> None:
    memory = np.arange(20, dtype=np.uint8)
    carry_out(CopyPlan.contiguous(0, 5, 10), memory)
    assert memory.tolist() == [*range(5), *range(10), *range(15, 20)]


def test_carry_out_converts_with_the_scale_of_the_row() -> None:
    # Two planes of two rows; the elements are bfloat16 1.0, 2.0.
    memory = np.zeros(200, np.uint8)
    memory[:100].view(np.uint16)[:] = np.tile(np.array([0x3F80, 0x4000], np.uint16), 25)
    box = CopyBox(0, 2, 0, 1, 0, 0, 0, 0, 2, 8, 4, 1, 0, 0, 4, 1, 2, 1, 0)
    made = CopyPlan(
        np.array([0, 40], np.uint64),
        np.array([100, 150], np.uint64),
        segments=np.zeros((1, 4), np.uint32),
        boxes=(box,),
        inverse_scales=np.array([9, 1, 2, 4, 8], np.float32),
        conversion="bfloat16",
    )
    assert sorted(carry_out(made, memory).tolist()) == [100, 101, 104, 105, 150, 151, 154, 155]
    # e4m3 of 1, 2, 4, 8 and 16.
    assert memory[[100, 101]].tolist() == [0x38, 0x40]
    assert memory[[104, 105]].tolist() == [0x40, 0x48]
    assert memory[[150, 151]].tolist() == [0x48, 0x50]
    assert memory[[154, 155]].tolist() == [0x50, 0x58]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boxes": (BOX, BOX)}, r"byte \d+ is written twice"),
        ({"boxes": (BOX._replace(run_bytes=17),)}, r"byte \d+ is written twice"),
        ({"boxes": (BOX._replace(outer_dst_stride=0),)}, r"byte \d+ is written twice"),
        ({"boxes": (BOX._replace(first_plane=1),)}, "planes past the end"),
        ({"boxes": (BOX._replace(num_segments=4),)}, "segments past the end"),
    ],
)
def test_carry_out_refuses_a_wrong_plan(changes: dict[str, object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        carry_out(plan(**changes), np.zeros(3000, np.uint8))


def test_carry_out_does_not_leave_its_memory() -> None:
    with pytest.raises(IndexError):
        carry_out(plan(), np.zeros(2000, np.uint8))
