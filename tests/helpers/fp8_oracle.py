"""Rounding to fp8 (e4m3) by a search among its 256 values, and the dtypes it comes from."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def _value(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return float(mantissa * 2.0**-9)
    return float((1 + mantissa / 8) * 2.0 ** (exponent - 7))


# 0x7f, all ones, is NaN.
FINITE = np.array([_value(code) for code in range(0x7F)])


def to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Nearest of the finite values, ties to the even code; NaN to 0x7f."""
    bounded = np.minimum(np.abs(values.astype(np.float64)), FINITE[-1])
    bounded = np.where(np.isnan(values), 0, bounded)
    below = np.searchsorted(FINITE, bounded, side="right") - 1
    above = np.minimum(below + 1, FINITE.size - 1)
    to_below, to_above = bounded - FINITE[below], FINITE[above] - bounded
    up = (to_above < to_below) | ((to_above == to_below) & (below % 2 == 1))
    code = np.where(up, above, below) | (np.signbit(values).astype(np.int64) << 7)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def to_float32(elements: NDArray[np.uint16], dtype: str) -> NDArray[np.float32]:
    """The values of bfloat16 or float16 elements."""
    if dtype == "bfloat16":
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements.view(np.float16).astype(np.float32)


def convert(elements: NDArray[np.uint16], dtype: str, inverse_scales: Any) -> NDArray[np.uint8]:
    """Elements times their scales in float32, rounded to e4m3; the two shapes broadcast."""
    with np.errstate(all="ignore"):
        scaled = to_float32(elements, dtype) * np.asarray(inverse_scales, np.float32)
    return to_e4m3(scaled)
