"""NIXL's agent against the accelerated one: what a post costs, and how fast the bytes go.

The far agent has a process of its own; its pages are private host memory. Each round prepares a
transfer of shuffled descriptors, posts it and polls it to its end; `post_us` is the first two. In
the end all pages are read back from the far side and compared.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

NUM_DESCRIPTORS = 32768
ROUNDS = 9
DEADLINE_S = 60.0


def make_agent(kind: str, name: str) -> Any:
    """A stock or an accelerated agent."""
    from kvxfer.connectors.nixl_agent import AcceleratedAgent

    return (AcceleratedAgent if kind == "accelerated" else AcceleratedAgent.__mro__[1])(name)


def serve(kind: str, page_bytes: int) -> None:
    """The far side: says how it is reached, and stays until its input ends."""
    pages = np.zeros((NUM_DESCRIPTORS, page_bytes), np.uint8)
    agent = make_agent(kind, "far")
    agent.register_memory([(pages.ctypes.data, pages.nbytes, 0, "")], "DRAM")
    facts = {"metadata": agent.get_agent_metadata().hex(), "address": pages.ctypes.data}
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


class Near:
    """The side that starts transfers, with all pages of both prepared."""

    def __init__(self, kind: str, page_bytes: int, far: Any) -> None:
        rng = np.random.default_rng(0)
        self.content = rng.integers(0, 256, (NUM_DESCRIPTORS, page_bytes), np.uint8)
        self.pages = self.content.copy()
        self.agent = make_agent(kind, "near")
        self.agent.register_memory([(self.pages.ctypes.data, self.pages.nbytes, 0, "")], "DRAM")
        name = self.agent.add_remote_agent(bytes.fromhex(far["metadata"])).decode()
        ends = (("NIXL_INIT_AGENT", self.pages.ctypes.data), (name, far["address"]))
        self.lists = [
            self.agent.prep_xfer_dlist(owner, rows(address, page_bytes), "DRAM")
            for owner, address in ends
        ]
        self.order = [rng.permutation(NUM_DESCRIPTORS).astype(np.int32) for _ in range(2)]
        self.post_us: list[float] = []

    def move(self, op: str) -> None:
        """One transfer, from its preparation to its end."""
        began = time.perf_counter()
        handle = self.agent.make_prepped_xfer(
            op, self.lists[0], self.order[0], self.lists[1], self.order[1]
        )
        state = self.agent.transfer(handle)
        self.post_us.append((time.perf_counter() - began) * 1e6)
        while state == "PROC":
            assert time.perf_counter() < began + DEADLINE_S, "the transfer hangs"
            time.sleep(50e-6)  # as an engine that does other things would poll, or less often
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE"
        self.agent.release_xfer_handle(handle)

    def num_wrong(self) -> int:
        """Pages that the far side does not hold, or does not give back."""
        self.pages[:] = 0
        self.move("READ")
        return int((self.pages != self.content).any(axis=1).sum())


@contextmanager
def near_of(kind: str, page_bytes: int) -> Iterator[Near]:
    """This side, with a far one in a child."""
    words = [sys.executable, __file__, kind, str(page_bytes)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        try:
            yield Near(kind, page_bytes, json.loads(child.stdout.readline()))
        finally:
            child.stdin.close()
            child.wait(DEADLINE_S)


def rows(address: int, page_bytes: int) -> Any:
    """Descriptors of all pages, uint64 ``[n, 3]``: address, bytes, device."""
    found = np.zeros((NUM_DESCRIPTORS, 3), np.uint64)
    offsets = np.arange(NUM_DESCRIPTORS, dtype=np.uint64) * np.uint64(page_bytes)
    found[:, 0] = np.uint64(address) + offsets
    found[:, 1] = page_bytes
    return found


@pytest.mark.benchmark(group="NIXL's agent, 32768 descriptors of private host memory")
@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("page_bytes", [4096])
@pytest.mark.parametrize("kind", ["stock", "accelerated"])
def test_nixl_agent(benchmark: Any, kind: str, page_bytes: int, op: str) -> None:
    pytest.importorskip("nixl_cu13", reason="NIXL is not installed; pip install nixl-cu13")
    with near_of(kind, page_bytes) as near:
        near.move("WRITE")  # connects, and gives READ something to read
        near.post_us.clear()
        benchmark.pedantic(near.move, args=(op,), rounds=ROUNDS, warmup_rounds=1)
        post_us = statistics.median(near.post_us)
        assert near.num_wrong() == 0
    benchmark.extra_info["post_us"] = post_us
    if benchmark.stats:
        median_s = benchmark.stats.stats.median
        benchmark.extra_info["gb_per_s"] = near.content.nbytes / median_s / 1e9


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
