"""The conversion to fp8 on CPU threads, exhaustively, against a search among fp8's values."""

import fp8_oracle
import numpy as np
import pytest
from copy_boxes import CopyBox, core_tables
from host_copies import copy, needs_attach
from numpy.typing import NDArray

ALL_ELEMENTS = np.arange(1 << 16, dtype=np.uint16)
SCALES = np.array(
    [1.0, 0.5, 1 / 3, 3.7, 448.0, 1e-3, 2.0**-20, 1e-38, 1e30, 0.0, np.inf, -1.0], np.float32
)


def convert(
    elements: NDArray[np.uint16], dtype: str, scales: NDArray[np.float32], engine: str
) -> NDArray[np.uint8]:
    """All elements with each scale: row i of one page takes scale i."""
    result = np.zeros((scales.size, elements.size), np.uint8)
    box = CopyBox(
        0,
        1,
        0,
        1,
        inner_count=scales.size,
        inner_dst_stride=elements.size,
        run_bytes=elements.nbytes,
        inner_scale_step=1,
    )
    tables = core_tables(
        np.array([elements.ctypes.data], np.uint64),
        np.array([result.ctypes.data], np.uint64),
        np.zeros((1, 4), np.uint32),
        [box],
        scales,
        dtype,
    )
    assert tables.num_bytes == result.nbytes
    copy(tables, engine, 2)
    return result


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_element_with_every_scale_is_the_nearest(dtype: str) -> None:
    expected = fp8_oracle.convert(ALL_ELEMENTS, dtype, SCALES[:, None])
    assert np.array_equal(convert(ALL_ELEMENTS, dtype, SCALES, "memcpy"), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_elements", [1, 3, 15, 16, 17, 33, 127])
def test_short_and_unaligned_rows(dtype: str, num_elements: int) -> None:
    raw = np.random.default_rng(1).integers(0, 256, 2 * num_elements + 1, np.uint8)
    unaligned = np.frombuffer(raw.data, np.uint16, num_elements, offset=1)
    found = convert(unaligned, dtype, SCALES, "memcpy")
    assert np.array_equal(found, fp8_oracle.convert(unaligned.copy(), dtype, SCALES[:, None]))


@needs_attach
@pytest.mark.parametrize("engine", ["read", "write"])
def test_cross_memory_converts_on_this_side(engine: str) -> None:
    # More than one bounce buffer, and rows that are longer than one.
    expected = fp8_oracle.convert(ALL_ELEMENTS, "bfloat16", SCALES[:, None])
    assert np.array_equal(convert(ALL_ELEMENTS, "bfloat16", SCALES, engine), expected)
    many = np.tile(ALL_ELEMENTS, 5)
    expected = fp8_oracle.convert(many, "float16", SCALES[:2, None])
    assert np.array_equal(convert(many, "float16", SCALES[:2], engine), expected)


def test_the_dtypes_are_told_apart() -> None:
    found = [convert(ALL_ELEMENTS, dtype, SCALES, "memcpy") for dtype in ("bfloat16", "float16")]
    assert not np.array_equal(*found)


def test_the_oracle_rounds_as_the_format_says() -> None:
    values, codes = zip(
        (1.0, 0x38),
        (448.0, 0x7E),
        (464.0, 0x7E),  # half-way to a value that the format does not have
        (np.inf, 0x7E),
        (-np.inf, 0xFE),
        (0.0, 0),
        (-0.0, 0x80),
        (2.0**-9, 1),
        (2.0**-10, 0),  # ties
        (3 * 2.0**-10, 2),
        (17 / 16, 0x38),
        (19 / 16, 0x3A),
        (np.nan, 0x7F),
        strict=True,
    )
    assert fp8_oracle.to_e4m3(np.array(values, np.float32)).tolist() == list(codes)
    finite = fp8_oracle.FINITE.astype(np.float32)
    assert fp8_oracle.to_e4m3(finite).tolist() == list(range(0x7F))
