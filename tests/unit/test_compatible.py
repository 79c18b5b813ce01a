"""require_compatible: what a plan bridges is let through, all else refused with both values."""

import dataclasses
from itertools import product

import pytest
from kv_oracle import KINDS, ORDERS

from kvxfer.errors import LayoutMismatch
from kvxfer.layout import DTYPE_BYTES, KVLayout, ToFp8, require_compatible

LAYOUT = KVLayout(2, 1, head_dim=8)
SAME = {"num_layers", "num_kv_heads", "head_dim", "dtype", "windows"}
BRIDGED = {"block_size", "order", "kv", "groups"}


def changed(**changes: object) -> KVLayout:
    return dataclasses.replace(LAYOUT, **changes)  # type: ignore[arg-type]


def refuse(src: KVLayout, dst: KVLayout, message: str, convert: ToFp8 | None = None) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        require_compatible(src, dst, convert)


def test_every_field_is_either_bridged_or_must_agree() -> None:
    assert {field.name for field in dataclasses.fields(KVLayout)} == SAME | BRIDGED


def test_orders_kinds_and_block_sizes_are_bridged() -> None:
    for kv, order, block_size in product(KINDS, ORDERS, (1, 16, 48)):
        require_compatible(LAYOUT, changed(kv=kv, order=order, block_size=block_size))


def test_groups_of_layers_are_bridged() -> None:
    require_compatible(LAYOUT, changed(groups=(0, 1)))


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"num_layers": 3}, "num_layers is 2 at the source and 3 at the destination"),
        ({"num_kv_heads": 2}, "num_kv_heads is 1 at the source and 2 at the destination"),
        ({"head_dim": 4}, "head_dim is 8 at the source and 4 at the destination"),
        ({"dtype": "float16"}, "dtype is bfloat16 at the source and float16 at the destination"),
        ({"windows": (0, 4)}, r"windows is \(\) at the source and \(0, 4\) at the destination"),
        ({"kv": "mla"}, "kv is split at the source and mla at the destination; mla has latents"),
    ],
)
def test_what_must_agree_is_named_with_both_values(changes: dict[str, object], values: str) -> None:
    refuse(LAYOUT, changed(**changes), values)
    # The other way round the values change places.
    here, there = (
        values.split(" is ")[1].split(" at the destination")[0].split(" at the source and ")
    )
    refuse(changed(**changes), LAYOUT, f"is {there} at the source and {here} at the destination")


def test_no_windows_and_windows_of_all_tokens_are_the_same() -> None:
    require_compatible(LAYOUT, changed(windows=(0, 0)))


def test_the_first_field_is_named() -> None:
    refuse(LAYOUT, changed(num_layers=3, head_dim=4), "num_layers is 2")


@pytest.mark.parametrize(("src", "dst"), [*product(DTYPE_BYTES, DTYPE_BYTES)])
def test_dtypes(src: str, dst: str) -> None:
    layouts = changed(dtype=src), changed(dtype=dst)
    convertible = src in ("bfloat16", "float16") and dst == "fp8_e4m3"
    both = f"dtype is {src} at the source and {dst} at the destination"
    if src == dst:
        require_compatible(*layouts)
    else:
        refuse(*layouts, both)
    if convertible:
        require_compatible(*layouts, ToFp8())
        refuse(*layouts, r"or ask for the conversion \(ToFp8\)")
    else:
        remedy = "; a conversion goes from bfloat16 or float16 to fp8_e4m3"
        refuse(*layouts, both + remedy, ToFp8())


def test_a_conversion_bridges_no_other_field() -> None:
    refuse(LAYOUT, changed(dtype="fp8", head_dim=4), "head_dim is 8", ToFp8())
