"""Ports that nobody has, for tests that must name one before it is bound, or bind it again.

They lie below the range from which the kernel takes ports by itself: one from within it may go to
any connection while no test has it bound. Each worker of pytest has a part of its own and goes
round in it, so that nothing but a program from elsewhere can come between.
"""

import os
import random
import socket
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_FIRST = 10_000
_NUM_TRIES = 200


def free_port(host: str = "127.0.0.1") -> int:
    """A port that can be bound now."""
    return free_base((0,), host)


def free_ports(number: int, host: str = "127.0.0.1") -> list[int]:
    """``number`` different ports that can be bound now."""
    return [free_port(host) for _ in range(number)]


def channel_ports() -> dict[str, int]:
    """Ports of an endpoint which a successor can bind again."""
    return {"init": free_port(), "alloc": free_port()}


def free_base(offsets: Iterable[int], host: str = "127.0.0.1") -> int:
    """A port so that it and those at all ``offsets`` above it can be bound now."""
    offsets = tuple(offsets)
    for _ in range(_NUM_TRIES):
        base = _part().take(max(offsets) + 1)
        if all(_is_free(host, base + offset) for offset in offsets):
            return base
    raise AssertionError(f"no free ports at offsets {offsets} of {host}")


class _Part:
    """The ports of one worker, handed out in turn from somewhere on."""

    def __init__(self, worker: int, num_workers: int) -> None:
        last = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        size = (last - _FIRST) // num_workers
        self._ports = range(_FIRST + worker * size, _FIRST + (worker + 1) * size)
        self._next = random.Random().choice(self._ports)

    def take(self, number: int) -> int:
        """The first of ``number`` ports in a row."""
        if self._next + number > self._ports.stop:
            self._next = self._ports.start
        first, self._next = self._next, self._next + number
        return first


@cache
def _part() -> _Part:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return _Part(int(worker), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
