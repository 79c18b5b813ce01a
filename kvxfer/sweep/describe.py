"""Layouts and paths in a few words."""

from kvxfer.layout import KVLayout

_USUAL_DTYPE = "bfloat16"


def describe_sms(num_sms: int) -> str:
    """An SM budget as it was asked for: ``auto`` where each copy chooses."""
    return str(num_sms) if num_sms else "auto"


def describe_layout(layout: KVLayout) -> str:
    """Order, kind, block size, and the dtype where it is not the usual one: ``nhd split 16``."""
    words = [layout.order.value, layout.kv.value, str(layout.block_size)]
    if layout.dtype != _USUAL_DTYPE:
        words.append(layout.dtype)
    return " ".join(words)
