"""Two accelerated NIXL agents in two processes, a GPU each."""

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peer_process import ChildProcess

if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu13", "nixl_cu12")):
    pytest.skip("NIXL is not installed", allow_module_level=True)

import nixl_agent_device_host
from nixl_agent_device_host import DeviceAgentHost
from nixl_agent_host import DEADLINE_S, OWN, permutations

_NUM_PAGES, _PAGE_BYTES = 32768, 4096


class Two:
    """A near agent on GPU 0 and a far one on GPU 1."""

    def __init__(self, child: ChildProcess) -> None:
        self.far, self.near = child, DeviceAgentHost()
        size = {"num_pages": _NUM_PAGES, "page_bytes": _PAGE_BYTES}
        child.call("open_on", side="far", device=1, **size)
        self.near.open_on("near", device=0, **size)
        name = self.near.know(child.call("metadata"))
        child.call("know", metadata=self.near.metadata())
        ends = ((OWN, self.near.address(), 0), (name, child.call("address"), 1))
        self.lists = [
            self.near.agent.prep_xfer_dlist(owner, rows(address, device), "VRAM")
            for owner, address, device in ends
        ]

    def post(self, op: str, seed: int, message: bytes = b"") -> Any:
        source, destination = permutations(seed, _NUM_PAGES)
        near, far = (source, destination) if op == "WRITE" else (destination, source)
        handle = self.near.agent.make_prepped_xfer(
            op, self.lists[0], near, self.lists[1], far, message
        )
        self.near.agent.transfer(handle)
        return handle

    def wait(self, handle: Any) -> None:
        end = time.monotonic() + DEADLINE_S
        while (state := self.near.agent.check_xfer_state(handle)) == "PROC":
            assert time.monotonic() < end, "the transfer hangs"
        assert state == "DONE"


def rows(address: int, device: int) -> Any:
    found = np.zeros((_NUM_PAGES, 3), np.uint64)
    offsets = np.arange(_NUM_PAGES, dtype=np.uint64) * np.uint64(_PAGE_BYTES)
    found[:, 0] = np.uint64(address) + offsets
    found[:, 1], found[:, 2] = _PAGE_BYTES, device
    return found


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    with ChildProcess(Path(nixl_agent_device_host.__file__)) as child:
        made = Two(child)
        yield made
        made.near.close()


def test_32768_descriptors_each_way(two: Two) -> None:
    two.wait(two.post("WRITE", 1))
    assert two.far.call("num_wrong", pages_seed=1, round_number=0, source_side="near") == 0
    two.far.call("fill", round_number=2)
    handle = two.post("READ", 2)
    assert handle.copy.plan.looks_up
    two.wait(handle)
    assert two.near.num_wrong(2, 2, "far") == 0
    assert set(two.near.agent.acceleration) == {"accelerated", "accelerated_bytes"}


def test_a_notification_comes_after_the_data(two: Two) -> None:
    for round_number in range(3, 13):
        two.near.fill(round_number)
        handle = two.post("WRITE", 3, f"round {round_number}".encode())
        assert two.far.call("notifs") == [["near", f"round {round_number}"]]
        wrong = two.far.call(
            "num_wrong", pages_seed=3, round_number=round_number, source_side="near"
        )
        assert wrong == 0
        two.wait(handle)


def test_dropped_handles_do_not_stop_copies(two: Two) -> None:
    two.near.fill(20)
    two.post("WRITE", 4, b"dropped")
    assert two.far.call("notifs") == [["near", "dropped"]]
    assert two.far.call("num_wrong", pages_seed=4, round_number=20, source_side="near") == 0


def test_the_poster_is_told_what_posting_took(two: Two) -> None:
    handle = two.post("WRITE", 5)
    two.wait(handle)
    told = two.near.agent.get_xfer_telemetry(handle)
    assert (told.totalBytes, told.descCount) == (_NUM_PAGES * _PAGE_BYTES, _NUM_PAGES)
    assert told.postDuration <= told.xferDuration
