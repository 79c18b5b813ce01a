"""A forked child ends, and uses, nothing that is its parent's."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

import kvxfer

NUM_BLOCKS = 8
LAYOUT = kvxfer.KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float16", block_size=16)


class Sides:
    """A cache that is reached, and one whose process reaches it; both here."""

    def __init__(self, stack: ExitStack, transport: str) -> None:
        self.caches = [self._cache(stack), self._cache(stack)]
        self.far, self.near = (
            stack.enter_context(kvxfer.Endpoint(cache, transport=transport))
            for cache in self.caches
        )
        self.peer = stack.enter_context(self.near.connect(self.far.addresses))

    def _cache(self, stack: ExitStack) -> kvxfer.KVCache:
        memory = kvxfer.shared_empty(NUM_BLOCKS * LAYOUT.block_bytes)
        np.asarray(memory).view(np.uint8)[:] = 0
        return stack.enter_context(kvxfer.KVCache(LAYOUT, memory))


@pytest.fixture(params=["shm", "nixl"])
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    found = kvxfer.available_transports()[request.param]
    if not found.available:
        pytest.skip(f"{request.param}: {found.reason}")
    with ExitStack() as stack:
        yield Sides(stack, request.param)


def in_a_child(work: Callable[[], object]) -> str:
    """What ``work`` raises in a forked child; empty if nothing."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    os.waitpid(pid, 0)
    return text


def test_a_connection_that_a_child_closes_goes_on(sides: Sides) -> None:
    ids = sides.peer.reserve("r", 2)
    assert in_a_child(sides.peer.close) == ""
    assert sides.far.blocks.num_free == NUM_BLOCKS - 2
    sides.peer.put([1, 2], ids).wait(20.0)
    sides.peer.commit("r")


@pytest.mark.parametrize("what", ["endpoint", "cache"])
def test_what_a_child_closes_is_open(sides: Sides, what: str) -> None:
    assert in_a_child(sides.far.close if what == "endpoint" else sides.caches[0].close) == ""
    sides.peer.put([1], [1]).wait(20.0)
    assert sides.far.wait(sides.peer.connection, 1, timeout_s=20.0)


def test_a_connection_that_a_child_drops_goes_on(sides: Sides) -> None:
    link = sides.peer.link

    def work() -> None:
        link.close()
        gc.collect()

    assert in_a_child(work) == ""
    sides.peer.put([1], [1]).wait(20.0)


def test_a_child_does_not_connect_in_its_parent_s_name(sides: Sides) -> None:
    said = in_a_child(lambda: sides.near.connect(sides.far.addresses))
    assert said.startswith("InvalidUsage: process ")
    assert f"forked off {os.getpid()}" in said
