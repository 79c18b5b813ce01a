"""Memory: arrays as address ranges, shared segments, and the right to move bytes in them."""

from kvxfer.memory.buffer import Buffer, MemoryKind, as_buffer
from kvxfer.memory.kv_cache import KVCache
from kvxfer.memory.registration import Registration, register
from kvxfer.memory.segment import create_segment, find_segment, shared_empty

__all__ = [
    "Buffer",
    "KVCache",
    "MemoryKind",
    "Registration",
    "as_buffer",
    "create_segment",
    "find_segment",
    "register",
    "shared_empty",
]
