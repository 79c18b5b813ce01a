"""What the core's tables of a copy refuse: a kernel that read beyond them would fault or worse."""

import numpy as np
import pytest
from copy_boxes import NO_SCALES, CopyBox, core_tables

from kvxfer import _core
from kvxfer.errors import InvalidUsage

ONE = np.zeros(1, np.uint64)
PLANES = np.zeros(3, np.uint64)
SEGMENTS = np.zeros((5, 4), np.uint32)
BOX = CopyBox(0, 3, 0, 5, run_bytes=64)
U32 = 1 << 32


def tables(
    box: CopyBox, *, conversion: str = "none", num_scales: int = 0, before: int = 0
) -> _core.PlanTables:
    scales = np.ones(num_scales, np.float32)
    return core_tables(PLANES, PLANES, SEGMENTS, [BOX] * before + [box], scales, conversion)


def test_what_fits_is_taken() -> None:
    assert tables(BOX).num_bytes == 3 * 5 * 64
    assert tables(BOX, before=2).num_bytes == 3 * 3 * 5 * 64
    assert core_tables(PLANES, PLANES, SEGMENTS, []).num_bytes == 0
    assert tables(BOX, conversion="bfloat16", num_scales=1).num_bytes == 3 * 5 * 32
    assert tables(BOX._replace(first_plane=3, num_planes=0)).num_bytes == 0
    assert tables(BOX._replace(first_segment=5, num_segments=0)).num_bytes == 0
    assert tables(BOX._replace(num_planes=1, num_segments=1, run_bytes=1 << 62))
    # Scales are not looked at without a conversion.
    assert tables(BOX._replace(first_scale=99)).num_bytes == 3 * 5 * 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_planes": 4}, "box 1: planes 0 to 4 of a table of 3"),
        ({"first_plane": 1}, "box 1: planes 1 to 4 of a table of 3"),
        ({"first_plane": U32 - 1}, "planes 4294967295 to 4294967298 of a table of 3"),
        ({"num_segments": 6}, "box 1: segments 0 to 6 of a table of 5"),
        ({"first_segment": 6, "num_segments": 0}, "segments 6 to 6 of a table of 5"),
        ({"outer_count": 0}, "box 1: 0 x 1 rows; use 1 or more"),
        ({"inner_count": 0}, "box 1: 1 x 0 rows; use 1 or more"),
        ({"run_bytes": 0}, "box 1: run_bytes is 0; use 1 to 2\\^62"),
        ({"run_bytes": (1 << 62) + 1}, "run_bytes is 4611686018427387905; use 1 to 2\\^62"),
        ({"run_bytes": 1 << 62}, "box 1 takes the plan beyond 2\\^62 bytes"),
        ({"outer_count": U32 - 1, "inner_count": U32 - 1}, "beyond 2\\^62 bytes"),
        *[
            ({name: U32}, f"box 1: {name} is 4294967296; use at most 2\\^32 - 1")
            for name in CopyBox._fields
            if "stride" not in name and name != "run_bytes"
        ],
    ],
)
def test_a_box_that_leaves_its_tables_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        tables(BOX._replace(**change), before=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_scale": 10}, "box 0: its last scale is entry 10 of a table of 10"),
        ({"scale_plane_step": 5}, "its last scale is entry 10 of"),
        ({"outer_count": 2, "outer_scale_step": 10}, "its last scale is entry 10 of"),
        ({"inner_count": 11, "inner_scale_step": 1}, "its last scale is entry 10 of"),
        ({"outer_count": U32 - 1, "outer_scale_step": U32 - 1}, "its last scale is entry"),
        ({"run_bytes": 63}, "box 0: run_bytes is 63; a conversion takes whole elements"),
    ],
)
def test_a_conversion_without_its_scales_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        tables(BOX._replace(**change), conversion="float16", num_scales=10)


def test_an_unknown_conversion_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="conversion 'float32'; use none, bfloat16 or float16"):
        tables(BOX, conversion="float32", num_scales=1)


def test_tables_of_another_shape_are_refused() -> None:
    boxes = np.array([BOX], np.uint64)
    with pytest.raises(InvalidUsage, match="tables of planes have 1 and 3 entries"):
        _core.PlanTables(ONE, PLANES, SEGMENTS, boxes, NO_SCALES, "none")
    with pytest.raises(InvalidUsage, match="give two rows of one length"):
        _core.PlanTables(ONE.reshape(1, 1), ONE, SEGMENTS, boxes, NO_SCALES, "none")
    with pytest.raises(InvalidUsage, match="table of segments is not \\[n, 4\\]"):
        _core.PlanTables(PLANES, PLANES, SEGMENTS.reshape(4, 5), boxes, NO_SCALES, "none")
    with pytest.raises(InvalidUsage, match="table of boxes is not \\[n, 19\\]"):
        _core.PlanTables(PLANES, PLANES, SEGMENTS, boxes[:, :-1].copy(), NO_SCALES, "none")
    with pytest.raises(InvalidUsage, match="table of boxes is not \\[n, 19\\]"):
        _core.PlanTables(PLANES, PLANES, SEGMENTS, boxes[0], NO_SCALES, "none")
    with pytest.raises(InvalidUsage, match="table of inverse scales has 2 axes"):
        _core.PlanTables(PLANES, PLANES, SEGMENTS, boxes, np.ones((1, 1), np.float32), "none")


@pytest.mark.parametrize(
    ("wrong", "how"),
    [
        *[(name, "another dtype") for name in ("planes", "segments", "boxes", "scales")],
        *[(name, "every other entry") for name in ("planes", "segments", "boxes", "scales")],
        *[(name, "columns first") for name in ("segments", "boxes")],
    ],
)
def test_arrays_that_would_have_to_be_copied_are_refused(wrong: str, how: str) -> None:
    arrays = {
        "planes": PLANES,
        "segments": SEGMENTS,
        "boxes": np.array([BOX, BOX, BOX], np.uint64),
        "scales": np.ones(3, np.float32),
    }
    right = arrays[wrong]
    arrays[wrong] = {
        "another dtype": right.astype(np.int64),
        "every other entry": np.repeat(right, 2, axis=0)[::2],
        "columns first": np.asfortranarray(right),
    }[how]
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        _core.PlanTables(
            arrays["planes"],
            PLANES,
            arrays["segments"],
            arrays["boxes"],
            arrays["scales"],
            "none",
        )
