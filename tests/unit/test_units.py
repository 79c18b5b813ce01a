"""Sizes and rates as people write and read them."""

import pytest

from kvxfer.errors import InvalidUsage
from kvxfer.units import format_bytes, format_share, gb_per_s, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("4k", 4096),
        ("4K", 4096),
        ("4kb", 4096),
        ("4KiB", 4096),
        ("  4k ", 4096),
        ("16m", 16 << 20),
        ("2g", 2 << 30),
        ("1.5MiB", 3 << 19),
        ("0.5k", 512),
        ("9007199254740993", (1 << 53) + 1),  # one more than a float can hold
        ("999999999999999g", 999999999999999 << 30),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        *["", " ", "k", "4x", "4 k", "-4k", "+4", "1e6", "0x10", "4kk", "4k,16k", ".5k", "5.k"],
        *["1_000", "nan", "inf", "\u0663k", "9" * 19, "9" * 400, "1." + "1" * 16],
    ],
)
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(InvalidUsage, match="is not a size; write bytes or 4k"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0", "0g", "0.1", "0.3k", "1.0001k"])
def test_a_size_is_a_whole_number_above_zero(text: str) -> None:
    with pytest.raises(InvalidUsage, match="use a whole number above zero"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (32768, "32 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1024 KiB"),
        (1 << 20, "1 MiB"),
        (3 << 29, "1.5 GiB"),
        (4096 << 30, "4096 GiB"),
    ],
)
def test_sizes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_what_is_written_can_be_read() -> None:
    for num_bytes in (1, 512, 4096, 98304, 5 << 20, 3 << 30):
        assert parse_bytes(format_bytes(num_bytes).replace(" ", "")) == num_bytes


def test_a_gigabyte_is_decimal() -> None:
    assert gb_per_s(1_000_000_000, 0.5) == 2.0
    assert gb_per_s(1 << 30, 1.0) == pytest.approx(1.073741824)


def test_a_share_that_falls_short_is_not_rounded_up() -> None:
    shares = (0.9, 0.07, 0.999, 0.899996, 0.004, 0.0, 1.0)
    assert [format_share(one) for one in shares] == [
        *("90%", "7%", "99.9%", "89.9996%", "0.4%", "0%", "100%")
    ]
