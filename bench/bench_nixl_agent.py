"""NIXL's agent against the accelerated one: what a post costs, and how fast the bytes go.

The far agent has a process of its own; its pages are private host memory, or on the second GPU
those of the near one being on the first. Each round prepares a transfer of shuffled descriptors,
posts it and polls it to its end; `post_us` is the first two. In the end all pages are read back
from the far side and compared. Between GPUs (needs torch) `copied_gb_per_s` is without those
two, and `of_limit` that over the rate of one contiguous copy of as many bytes in the same process.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

NUM_DESCRIPTORS = 32768
ROUNDS = 9
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Pages:
    """All pages of one side, uint8 ``[n, page_bytes]``: an array of the host or a torch tensor."""

    values: Any
    address: int
    segment: str
    device: int

    @classmethod
    def make(cls, page_bytes: int, segment: str, device: int) -> "Pages":
        """Zeros; ``device`` counts GPUs, and is 0 for host memory."""
        shape = (NUM_DESCRIPTORS, page_bytes)
        if segment == "DRAM":
            values = np.zeros(shape, np.uint8)
            return cls(values, values.ctypes.data, segment, 0)
        import torch

        torch.cuda.set_device(device)  # UCX takes the GPU's context of the thread
        tensor = torch.zeros(shape, dtype=torch.uint8, device=f"cuda:{device}")
        torch.cuda.synchronize()
        return cls(tensor, tensor.data_ptr(), segment, device)

    def write(self, content: Any) -> None:
        """Take the content of an array of the host, or 0."""
        if self.segment == "VRAM":
            import torch

            content = content if isinstance(content, int) else torch.from_numpy(content)
        self.values[:] = content
        if self.segment == "VRAM":
            torch.cuda.synchronize()

    def read(self) -> Any:
        """The content as an array of the host."""
        return self.values if self.segment == "DRAM" else self.values.cpu().numpy()


def make_agent(kind: str, name: str, pages: Pages) -> Any:
    """A stock or an accelerated agent that has its pages registered."""
    from kvxfer.connectors.nixl_agent import AcceleratedAgent

    agent = (AcceleratedAgent if kind == "accelerated" else AcceleratedAgent.__mro__[1])(name)
    whole = (pages.address, pages.values.shape[0] * pages.values.shape[1], pages.device, "")
    agent.register_memory([whole], pages.segment)
    return agent


def serve(kind: str, segment: str, page_bytes: int) -> None:
    """The far side: says how it is reached, and stays until its input ends."""
    pages = Pages.make(page_bytes, segment, device=1)
    agent = make_agent(kind, "far", pages)
    facts = {
        "metadata": agent.get_agent_metadata().hex(),
        "address": pages.address,
        "device": pages.device,
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


class Near:
    """The side that starts transfers, with all pages of both prepared."""

    def __init__(self, kind: str, segment: str, page_bytes: int, far: Any) -> None:
        rng = np.random.default_rng(0)
        self.content = rng.integers(0, 256, (NUM_DESCRIPTORS, page_bytes), np.uint8)
        self.pages = Pages.make(page_bytes, segment, device=0)
        self.pages.write(self.content)
        self.agent = make_agent(kind, "near", self.pages)
        name = self.agent.add_remote_agent(bytes.fromhex(far["metadata"])).decode()
        ends = (
            ("NIXL_INIT_AGENT", self.pages.address, self.pages.device),
            (name, far["address"], far["device"]),
        )
        self.lists = [
            self.agent.prep_xfer_dlist(owner, rows(address, page_bytes, device), segment)
            for owner, address, device in ends
        ]
        self.order = [rng.permutation(NUM_DESCRIPTORS).astype(np.int32) for _ in range(2)]
        self.post_us: list[float] = []
        # On the host the copying threads need the cores; a GPU needs none.
        self._pause_s = 50e-6 if segment == "DRAM" else 0.0

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
            time.sleep(self._pause_s)
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE"
        self.agent.release_xfer_handle(handle)

    def num_wrong(self) -> int:
        """Pages that the far side does not hold, or does not give back."""
        self.pages.write(0)
        self.move("READ")
        return int((self.pages.read() != self.content).any(axis=1).sum())


@contextmanager
def near_of(kind: str, segment: str, page_bytes: int) -> Iterator[Near]:
    """This side, with a far one in a child."""
    words = [sys.executable, __file__, kind, segment, str(page_bytes)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        try:
            yield Near(kind, segment, page_bytes, json.loads(child.stdout.readline()))
        finally:
            child.stdin.close()
            child.wait(DEADLINE_S)


def rows(address: int, page_bytes: int, device: int) -> Any:
    """Descriptors of all pages, uint64 ``[n, 3]``: address, bytes, device."""
    found = np.zeros((NUM_DESCRIPTORS, 3), np.uint64)
    offsets = np.arange(NUM_DESCRIPTORS, dtype=np.uint64) * np.uint64(page_bytes)
    found[:, 0] = np.uint64(address) + offsets
    found[:, 1], found[:, 2] = page_bytes, device
    return found


def require(segment: str) -> None:
    """Skip where NIXL or the GPUs are missing."""
    if segment == "VRAM":
        torch = pytest.importorskip("torch", reason="memory of GPUs is torch's here")
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
    pytest.importorskip("nixl_cu13", reason="NIXL is not installed; pip install nixl-cu13")


@pytest.mark.benchmark(group="NIXL's agent, 32768 descriptors")
@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize(("segment", "page_bytes"), [("DRAM", 4096), ("VRAM", 32768)])
@pytest.mark.parametrize("kind", ["stock", "accelerated"])
def test_nixl_agent(
    benchmark: Any, one_copy_gb_per_s: Any, kind: str, segment: str, page_bytes: int, op: str
) -> None:
    require(segment)
    with near_of(kind, segment, page_bytes) as near:
        near.move("WRITE")  # connects, and gives READ something to read
        near.post_us.clear()
        benchmark.pedantic(near.move, args=(op,), rounds=ROUNDS, warmup_rounds=1)
        post_us = statistics.median(near.post_us)
        assert near.num_wrong() == 0
    benchmark.extra_info["post_us"] = post_us
    if benchmark.stats:
        median_s, num_bytes = benchmark.stats.stats.median, near.content.nbytes
        benchmark.extra_info["gb_per_s"] = num_bytes / median_s / 1e9
        if segment == "VRAM":
            copied_gb_per_s = num_bytes / (median_s - post_us / 1e6) / 1e9
            benchmark.extra_info["copied_gb_per_s"] = copied_gb_per_s
            benchmark.extra_info["of_limit"] = copied_gb_per_s / one_copy_gb_per_s(
                "cuda:0", "cuda:1", num_bytes
            )


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
