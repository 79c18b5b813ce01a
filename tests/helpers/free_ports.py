"""Ports that nobody has, for tests that must name one before it is bound."""

import random
import socket
from collections.abc import Iterable

_FIRST, _LAST = 10_000, 32_700  # below the range that the kernel takes ports from by itself
_NUM_TRIES = 200


def free_ports(number: int, host: str = "127.0.0.1") -> list[int]:
    """``number`` different ports that can be bound now."""
    found: set[int] = set()
    while len(found) < number:
        found.add(free_base((0,), host))
    return list(found)


def free_base(offsets: Iterable[int], host: str = "127.0.0.1") -> int:
    """A port so that it and those at all ``offsets`` above it can be bound now."""
    offsets = tuple(offsets)
    rng = random.Random()
    for _ in range(_NUM_TRIES):
        base = rng.randrange(_FIRST, _LAST - max(offsets))
        if all(_is_free(host, base + offset) for offset in offsets):
            return base
    raise AssertionError(f"no free ports at offsets {offsets} of {host}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
