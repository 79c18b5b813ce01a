"""Whether one cache can be copied into another: checked when layouts meet, before any copy."""

from enum import Enum

from kvxfer.errors import LayoutMismatch
from kvxfer.layout.conversion import DESTINATION, SOURCES, ToFp8
from kvxfer.layout.kv_layout import KVKind, KVLayout

# What may differ, because a plan bridges it: order, kv and block_size.
_SAME = ("num_layers", "num_kv_heads", "head_dim", "windows")


def require_compatible(src: KVLayout, dst: KVLayout, convert: ToFp8 | None = None) -> None:
    """Check that a cache of the whole model ``src`` can be copied into one of ``dst``.

    Raises:
        LayoutMismatch: names the first field that forbids it, and both values.
    """
    for field in _SAME:
        src_value, dst_value = getattr(src, field), getattr(dst, field)
        if src_value != dst_value:
            raise _mismatch(field, src_value, dst_value, "give both sides the same model")
    if src.num_vectors != dst.num_vectors:
        raise _mismatch("kv", src.kv, dst.kv, f"{KVKind.MLA.value} has latents, others K and V")
    if convert is None:
        if src.dtype != dst.dtype:
            raise _mismatch(
                "dtype", src.dtype, dst.dtype, _CONVERT_HINT if _converts(src, dst) else _SAME_DTYPE
            )
    elif not _converts(src, dst):
        raise _mismatch(
            "dtype",
            src.dtype,
            dst.dtype,
            f"a conversion goes from {' or '.join(SOURCES)} to {DESTINATION}",
        )


_SAME_DTYPE = "give both sides the same dtype"
_CONVERT_HINT = "give both sides the same dtype, or ask for the conversion (ToFp8)"


def _converts(src: KVLayout, dst: KVLayout) -> bool:
    return src.dtype in SOURCES and dst.dtype == DESTINATION


def _mismatch(field: str, src: object, dst: object, remedy: str) -> LayoutMismatch:
    src, dst = (one.value if isinstance(one, Enum) else one for one in (src, dst))
    return LayoutMismatch(f"{field} is {src} at the source and {dst} at the destination; {remedy}")
