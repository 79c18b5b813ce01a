"""Two NIXL agents, of which one or both are accelerated, in two processes."""

import base64
import functools
import importlib.util
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from peer_process import ChildProcess

if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu13", "nixl_cu12")):
    pytest.skip("NIXL is not installed", allow_module_level=True)

import nixl_agent_host
from nixl_agent_host import OWN, AgentHost, permutations

from kvxfer.connectors.nixl_agent import AcceleratedAgent
from kvxfer.connectors.nixl_agent.facts import seal, unseal
from kvxfer.connectors.nixl_agent.lanes import Copy
from kvxfer.transport.nixl.api import load_api

_PROGRAM = Path(nixl_agent_host.__file__)
_BIG = {"num_pages": 32768, "page_bytes": 512}
_SMALL = {"num_pages": 64, "page_bytes": 4096}


class Two:
    """A near host, which starts transfers, and a far one in a process of its own."""

    def __init__(self, far: ChildProcess, near: AgentHost) -> None:
        self.far, self.near = far, near
        self.name = ""

    @property
    def agent(self) -> Any:
        return self.near.agent

    def meet(self) -> None:
        """Exchange metadata."""
        self.name = self.near.know(self.far.call("metadata"))
        self.far.call("know", metadata=self.near.metadata())

    def lists(self) -> tuple[Any, Any]:
        """All pages of both sides, prepared."""
        return (
            self.agent.prep_xfer_dlist(OWN, rows(self.near.address(), self.near.pages), "DRAM"),
            self.agent.prep_xfer_dlist(
                self.name, rows(self.far.call("address"), self.near.pages), "DRAM"
            ),
        )

    def all_pages(self, op: str, seed: int, message: bytes = b"") -> Any:
        """A transfer of all pages in an order of their own on either side."""
        near, far = self.lists()
        source, destination = permutations(seed, len(self.near.pages))
        picked = (source, destination) if op == "WRITE" else (destination, source)
        return self.agent.make_prepped_xfer(op, near, picked[0], far, picked[1], message)

    def run(self, handle: Any, message: bytes = b"") -> str:
        """Post, and poll until it has ended."""
        state = self.agent.transfer(handle, message)
        end = time.monotonic() + nixl_agent_host.DEADLINE_S
        while state == "PROC":
            assert time.monotonic() < end, "the transfer hangs"
            state = self.agent.check_xfer_state(handle)
            time.sleep(0.001)
        return str(state)

    @property
    def num_accelerated(self) -> int:
        return int(self.agent.acceleration.get("accelerated", 0))


def rows(address: int, pages: Any) -> Any:
    """Descriptors of pages, uint64 ``[n, 3]``."""
    count, page_bytes = len(pages), pages[0].nbytes
    found = np.zeros((count, 3), np.uint64)
    found[:, 0] = np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(page_bytes)
    found[:, 1] = page_bytes
    return found


@contextmanager
def opened_with(
    child: ChildProcess,
    *,
    near: bool = True,
    far: bool = True,
    shared: bool = False,
    by_nixl: bool = False,
    **size: int,
) -> Iterator[Two]:
    """Two agents that know each other.

    Args:
        child: where the far one is to be.
        near: whether this side's is accelerated.
        far: whether the far one is.
        shared: whether pages lie in shared segments.
        by_nixl: whether NIXL copies, which takes its progress thread on both sides.
        size: of the pages.
    """
    near_host = AgentHost()
    child.call("open", side="far", accelerated=far, shared=shared, progress=by_nixl, **size)
    near_host.open("near", accelerated=near, shared=shared, **size)
    two = Two(child, near_host)
    try:
        two.meet()
        yield two
    finally:
        near_host.close()


@pytest.fixture(scope="module")
def child() -> Iterator[ChildProcess]:
    """The far process, which tests share; each has an agent of its own there."""
    with ChildProcess(_PROGRAM) as started:
        yield started


@pytest.fixture
def opened(child: ChildProcess) -> Any:
    """Opens two agents; see `opened_with`."""
    return functools.partial(opened_with, child)


@pytest.fixture(scope="module")
def small() -> Iterator[Two]:
    """Two accelerated agents that tests share; none may leave memory deregistered."""
    with ChildProcess(_PROGRAM) as own, opened_with(own, **_SMALL) as two:
        yield two


@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
def test_nixl_agent_moves_32768_descriptors(opened: Any, shared: bool) -> None:
    with opened(shared=shared, **_BIG) as two:
        assert two.run(two.all_pages("WRITE", seed=1)) == "DONE"
        assert two.far.call("num_wrong", pages_seed=1, round_number=0, source_side="near") == 0
        two.far.call("fill", round_number=2)
        assert two.run(two.all_pages("READ", seed=2)) == "DONE"
        assert two.near.num_wrong(2, 2, "far") == 0
        assert two.agent.acceleration == {
            "accelerated": 2,
            "accelerated_bytes": 2 * two.near.pages.nbytes,
        }


def test_nixl_agent_check_sees_one_wrong_page(small: Two) -> None:
    assert small.run(small.all_pages("READ", seed=3)) == "DONE"
    assert small.near.num_wrong(3, 0, "far") == 0
    small.near.pages[7, 5] += np.uint64(1)
    assert small.near.num_wrong(3, 0, "far") == 1


@pytest.mark.parametrize(("near", "far"), [(True, False), (False, True)])
def test_nixl_agent_and_a_stock_agent(opened: Any, near: bool, far: bool) -> None:
    with opened(near=near, far=far, by_nixl=True, **_SMALL) as two:
        assert two.run(two.all_pages("WRITE", seed=4, message=b"there")) == "DONE"
        assert two.far.call("num_wrong", pages_seed=4, round_number=0, source_side="near") == 0
        assert two.far.call("notifs") == [["near", "there"]]
        if near:
            assert two.num_accelerated == 0
            assert any("stock" in reason for reason in two.agent.acceleration)


def test_nixl_agent_notifies_after_the_data(opened: Any) -> None:
    with opened(**_BIG) as two:
        handle = two.all_pages("WRITE", seed=5, message=b"go")
        for round_number in range(1, 6):
            two.near.fill(round_number)
            told = two.far.start(
                "expect", pages_seed=5, round_number=round_number, source_side="near"
            )
            two.agent.transfer(handle)  # and never polled before the far side is told
            assert told() == {"notified": True, "num_wrong": 0}
            assert two.agent.check_xfer_state(handle) in ("PROC", "DONE")
            while two.agent.check_xfer_state(handle) == "PROC":
                time.sleep(0.001)


def test_nixl_agent_race_sees_an_early_notification(opened: Any) -> None:
    with opened(**_BIG) as two:
        handle = two.all_pages("WRITE", seed=6)
        two.near.fill(1)
        told = two.far.start("expect", pages_seed=6, round_number=1, source_side="near")
        two.agent.send_notif(two.name, b"early")
        outcome = told()
        assert two.run(handle) == "DONE"
        assert outcome["notified"]
        assert outcome["num_wrong"] > 0


def test_nixl_agent_posts_again_with_the_message_of_before(small: Two) -> None:
    handle = small.all_pages("READ", seed=7, message=b"first")
    heard = []
    for message in (b"", b"second", b""):
        assert small.run(handle, message) == "DONE"
        heard += small.far.call("notifs")
    assert heard == [["near", "first"], ["near", "second"], ["near", "second"]]


@pytest.mark.parametrize(
    ("near_indices", "far_indices"),
    [([64], [0]), ([-1], [0]), ([0, 1], [0]), ([], []), ([1], [64])],
)
def test_nixl_agent_refuses_bad_indices_as_nixl_does(
    small: Two, near_indices: list[int], far_indices: list[int]
) -> None:
    near, far = small.lists()
    with pytest.raises(load_api().nixlBind.nixlInvalidParamError):
        small.agent.make_prepped_xfer("READ", near, near_indices, far, far_indices)


def test_nixl_agent_refuses_an_unknown_agent_as_nixl_does(small: Two) -> None:
    with pytest.raises(load_api().nixlBind.nixlNotFoundError):
        small.agent.prep_xfer_dlist("nobody", rows(4096, small.near.pages), "DRAM")


def test_nixl_agent_states_of_a_handle(small: Two) -> None:
    bind = load_api().nixlBind
    handle = small.all_pages("READ", seed=8)
    for ask in (small.agent.check_xfer_state, small.agent.get_xfer_telemetry):
        with pytest.raises(bind.nixlNotPostedError):
            ask(handle)
    assert small.run(handle) == "DONE"
    told = small.agent.get_xfer_telemetry(handle)
    assert (told.totalBytes, told.descCount) == (small.near.pages.nbytes, 64)
    assert 0 <= told.postDuration <= told.xferDuration
    assert small.agent.query_xfer_backend(handle) == "UCX"
    small.agent.release_xfer_handle(handle)
    small.agent.release_xfer_handle(handle)
    with pytest.raises(bind.nixlInvalidParamError):
        small.agent.transfer(handle)


def test_nixl_agent_takes_lists_of_several_lengths(small: Two) -> None:
    before = small.num_accelerated
    far_address, near_address = small.far.call("address"), small.near.address()
    lengths = [8, 4096, 24, 4096, 8, 12288]
    far = [(far_address + 16384 * at, size, 0) for at, size in enumerate(lengths)]
    near = [(near_address + 16384 * at, size, 0) for at, size in enumerate(reversed(lengths))]
    small.near.fill(1)
    handle = small.agent.initialize_xfer(
        "READ",
        small.agent.get_xfer_descs(near[::-1], "DRAM"),
        small.agent.get_xfer_descs(far, "DRAM"),
        small.name,
        b"",
    )
    assert small.run(handle) == "DONE"
    assert small.num_accelerated == before + 1
    wanted = small.near.content(1, "near").reshape(-1)
    source = small.near.content(0, "far").reshape(-1)
    for at, size in enumerate(lengths):
        to = (len(lengths) - 1 - at) * 2048
        wanted[to : to + size // 8] = source[at * 2048 : at * 2048 + size // 8]
    np.testing.assert_array_equal(small.near.pages.reshape(-1), wanted)


def test_nixl_agent_leaves_strided_lists_to_nixl(opened: Any) -> None:
    with opened(by_nixl=True, **_SMALL) as two:
        table = [[two.near.address(), 4096, 0, 4096, 64]]
        near = two.agent.prep_xfer_dlist(OWN, np.array(table, np.uint64), "DRAM")
        far = two.lists()[1]
        all_pages = np.arange(64)
        handle = two.agent.make_prepped_xfer("READ", near, all_pages, far, all_pages)
        assert two.run(handle) == "DONE"
        np.testing.assert_array_equal(two.near.pages, two.near.content(0, "far"))
        assert two.agent.acceleration == {"strided lists": 1}


def test_nixl_agent_ends_what_was_deregistered(opened: Any) -> None:
    with opened(**_SMALL) as two:
        handle = two.all_pages("READ", seed=9)
        assert two.run(handle) == "DONE"
        two.far.call("deregister")
        assert two.run(handle) == "ERR"
        two.far.call("register")
        assert two.run(handle) == "ERR", "a new registration is another"
        two.meet()
        two.near.fill(1)
        assert two.run(two.all_pages("READ", seed=9)) == "DONE"
        assert two.near.num_wrong(9, 0, "far") == 0
        handle = two.all_pages("WRITE", seed=9)
        two.near.deregister()
        assert two.run(handle) == "ERR"


def test_nixl_agent_ends_transfers_with_the_dead_and_the_removed() -> None:
    with ChildProcess(_PROGRAM) as doomed, opened_with(doomed, **_SMALL) as two:
        handle = two.all_pages("READ", seed=10)
        two.far.kill()
        assert two.run(handle) == "ERR"
        two.agent.remove_remote_agent(two.name)
        with pytest.raises(load_api().nixlBind.nixlNotFoundError):
            two.agent.transfer(handle)


def test_nixl_agent_release_of_a_copy_in_flight(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, on_host = threading.Event(), Copy.on_host

    def held(copy: Copy, pool: Any) -> None:
        assert gate.wait(nixl_agent_host.DEADLINE_S)
        on_host(copy, pool)

    monkeypatch.setattr(Copy, "on_host", held)
    with opened(**_BIG) as two:
        first, second = two.all_pages("WRITE", seed=11), two.all_pages("WRITE", seed=11)
        assert two.agent.transfer(first) == "PROC"
        assert two.agent.transfer(second) == "PROC"  # waits behind the first
        with pytest.raises(load_api().nixlBind.nixlRepostActiveError):
            two.agent.transfer(second)
        two.agent.release_xfer_handle(second)
        while not first.job._is_begun:
            time.sleep(0.001)
        with pytest.raises(load_api().nixlBind.nixlBackendError):
            two.agent.release_xfer_handle(first)
        gate.set()
        while True:
            try:
                two.agent.release_xfer_handle(first)
                break
            except load_api().nixlBind.nixlBackendError:
                time.sleep(0.001)
        assert two.far.call("num_wrong", pages_seed=11, round_number=0, source_side="near") == 0


def test_nixl_agent_of_another_process_cannot_be_forged(small: Two) -> None:
    genuine = base64.b64decode(small.far.call("metadata"))
    metadata, facts = unseal(genuine)
    assert facts is not None
    wrong = msgspec.structs.replace(facts, secret=bytes(16))
    agent = AcceleratedAgent("doubter")
    agent.add_remote_agent(seal(metadata, wrong))
    assert agent.acceleration == {"peers that are not reached directly": 1}


def test_nixl_agents_of_one_process() -> None:
    api = load_api()
    ends = [AcceleratedAgent(name, api.nixl_agent_config()) for name in ("one", "two")]
    memory = [np.full(1 << 20, value, np.uint8) for value in (1, 2)]
    for agent, array in zip(ends, memory, strict=True):
        agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")
    name = ends[0].add_remote_agent(ends[1].get_agent_metadata())
    assert name == b"two", "NIXL's binding returns bytes"
    ends[1].add_remote_agent(ends[0].get_agent_metadata())
    whole = [[(array.ctypes.data, array.nbytes, 0)] for array in memory]
    handle = ends[0].initialize_xfer(
        "WRITE",
        ends[0].get_xfer_descs(whole[0], "DRAM"),
        ends[0].get_xfer_descs(whole[1], "DRAM"),
        name,
        "done",
    )
    ends[0].transfer(handle)
    end = time.monotonic() + nixl_agent_host.DEADLINE_S
    while not ends[1].check_remote_xfer_done("one", b"done"):
        assert time.monotonic() < end
    assert (memory[1] == 1).all()
    assert ends[0].check_xfer_state(handle) in ("PROC", "DONE")
    assert ends[0].acceleration["accelerated"] == 1
