"""Numbers in options."""

import math

import pytest

from kvxfer.pd.numerals import decimal


@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 5.0), (" 5.25 ", 5.25), (".5", 0.5), ("5.", 5.0), ("-1", -1.0), ("+2e-3", 0.002),
     ("1E3", 1000.0), ("1e999", math.inf)],
)  # fmt: skip
def test_decimal_numbers_are_read(text: str, value: float) -> None:
    assert decimal(text) == value


@pytest.mark.parametrize(
    "text", ["", "1_000", "５００", "٣", "nan", "inf", "infinity", "0x5", "1e", ".", "5ms", "1 000"]
)
def test_what_is_no_decimal_number_is_none(text: str) -> None:
    assert math.isnan(decimal(text))
