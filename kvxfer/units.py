"""Sizes and rates as people write them. GB = 1e9 bytes, GiB = 2**30 bytes."""

import math
import re
from fractions import Fraction

from kvxfer.errors import InvalidUsage

_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,15})?)([kmg]?)(?:i?b)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read a size such as ``4096``, ``4k``, ``1.5MiB``: k, m and g are powers of 1024.

    Raises:
        InvalidUsage: the text is not a size, or not a whole number of bytes above zero.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidUsage(f"{text!r} is not a size; write bytes or 4k, 16k, 1m, 2g")
    value = Fraction(match[1]) * _FACTORS[match[2].lower()]
    if value < 1 or value.denominator != 1:
        raise InvalidUsage(f"{text!r} is {float(value):g} bytes; use a whole number above zero")
    return int(value)


def format_bytes(num_bytes: int) -> str:
    """Write a size in the largest binary unit that keeps it exact to three figures."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.4g} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_tokens(count: int) -> str:
    """8192 as 8k, 1000 as 1000."""
    return f"{count >> 10}k" if count >= 1024 and count % 1024 == 0 else str(count)


def format_number(value: float) -> str:
    """Three figures, no exponent, thousands apart: 0.00123, 1.5, 12,300."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    text = f"{round(value, digits):,.{max(0, digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_gpus(count: int) -> str:
    """1 GPU, 2 GPUs."""
    return f"{count} GPU{'' if count == 1 else 's'}"


def format_share(share: float) -> str:
    """0.9 as 90%, 0.999 as 99.9%: six figures, so that one that falls short is not rounded up."""
    return f"{100.0 * share:g}%"


def gb_per_s(num_bytes: int, seconds: float) -> float:
    """Rate in 1e9 bytes a second."""
    return num_bytes / seconds / 1e9
