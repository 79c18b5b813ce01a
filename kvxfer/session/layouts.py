"""Layouts where two endpoints meet."""

import msgspec

from kvxfer.control import LayoutSpec
from kvxfer.errors import LayoutMismatch
from kvxfer.layout import KVLayout


def layout_spec(layout: KVLayout) -> LayoutSpec:
    """A layout as it travels."""
    return LayoutSpec(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        block_size=layout.block_size,
        order=layout.order.value,
        kv=layout.kv.value,
    )


def require_equal_layouts(theirs: LayoutSpec, ours: LayoutSpec) -> None:
    """Refuse a peer of another layout before anything is sent.

    Raises:
        LayoutMismatch: names the first field that differs, and both values.
    """
    for field in msgspec.structs.fields(LayoutSpec):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if mine != other:
            raise LayoutMismatch(
                f"{field.name} is {other!r} on the connecting side and {mine!r} here; both caches "
                "must have the same layout"
            )
