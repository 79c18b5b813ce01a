"""Two hosts, as far as the network is concerned: network namespaces that a veth pair joins."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress

import pytest

NAMESPACES = tuple(f"kvxfer-{os.getpid()}-{side}" for side in "ab")
HOSTS = ("10.213.77.1", "10.213.77.2")
_DEVICES = ("kvxfer-va", "kvxfer-vb")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def two_hosts() -> Iterator[None]:
    """Two network namespaces that a veth pair joins."""
    try:
        _join()
    except OSError as error:
        _leave()
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield
    finally:
        _leave()


def slow_down(index: int, mbit_per_s: int) -> None:
    """What one of the two sends goes no faster from now on; skips where that cannot be had."""
    rate = f"{mbit_per_s}mbit"
    words = ["-n", NAMESPACES[index], "qdisc", "replace", "dev", _DEVICES[index], "root"]
    try:
        done = subprocess.run(
            ["tc", *words, "tbf", "rate", rate, "burst", "32kb", "latency", "50ms"],
            capture_output=True, text=True, timeout=20,
        )  # fmt: skip
    except OSError as error:
        pytest.skip(f"no tc here: {error}")
    if done.returncode != 0:
        pytest.skip(f"tc cannot slow a network down here: {done.stderr.strip()}")


def _join() -> None:
    for name in NAMESPACES:
        _ip("netns", "add", name)
    _ip("link", "add", _DEVICES[0], "netns", NAMESPACES[0], "type", "veth", "peer", "name",
        _DEVICES[1], "netns", NAMESPACES[1])  # fmt: skip
    for name, device, host in zip(NAMESPACES, _DEVICES, HOSTS, strict=True):
        _ip("-n", name, "address", "add", f"{host}/30", "dev", device)
        _ip("-n", name, "link", "set", device, "up")
        _ip("-n", name, "link", "set", "lo", "up")


def _leave() -> None:
    with suppress(OSError):  # there is no such program
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


def start_on_host(index: int, *words: str) -> "subprocess.Popen[str]":
    """A program on one of the two, with pipes."""
    return subprocess.Popen(
        ["ip", "netns", "exec", NAMESPACES[index], *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",  # in a source tree Python would find a kvxfer/ without _core
    )
