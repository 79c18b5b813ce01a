"""The parts of the accelerated NIXL agent that need no NIXL."""

import gc
import os
import subprocess
import sys
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from waiting import eventually

from kvxfer import _core
from kvxfer.connectors.nixl_agent import facts as wire
from kvxfer.connectors.nixl_agent.facts import AgentFacts, RegionFacts, seal, unseal
from kvxfer.connectors.nixl_agent.installation import SIGNATURES, VERSIONS, complaints
from kvxfer.connectors.nixl_agent.lanes import Copy, HostLane, Job
from kvxfer.connectors.nixl_agent.ledger import Ledger, Span, Standing, map_ledger
from kvxfer.connectors.nixl_agent.pairing import Pairing
from kvxfer.connectors.nixl_agent.remote_agent import RemoteAgent
from kvxfer.errors import (
    KvxferError,
    NotAvailable,
    PeerLost,
    ProtocolMismatch,
    RegistrationError,
)
from kvxfer.memory import MemoryKind, shared_empty
from kvxfer.transport.process import ProcessSpec


def span_of(array: Any, device: int = 0) -> Span:
    return Span(MemoryKind.HOST, device, array.ctypes.data, array.nbytes)


@pytest.fixture
def ledger() -> Any:
    with Ledger() as made:
        yield made


# Facts behind NIXL's metadata.


def test_facts_return_and_leave_the_metadata_whole(ledger: Ledger) -> None:
    memory = np.zeros(4096, np.uint8)
    ledger.add(span_of(memory))
    sealed = seal(b"metadata of NIXL", ledger.facts())
    assert sealed.startswith(b"metadata of NIXL")
    assert unseal(sealed) == (b"metadata of NIXL", ledger.facts())


def test_metadata_without_facts_is_as_it_was() -> None:
    for data in (b"", b"x" * 10, b"metadata" * 100):
        assert unseal(data) == (data, None)


def test_damaged_facts_are_none(ledger: Ledger) -> None:
    sealed = seal(b"metadata of NIXL", ledger.facts())
    for at in range(len(b"metadata of NIXL"), len(sealed)):
        damaged = bytearray(sealed)
        damaged[at] ^= 0x5A
        assert unseal(bytes(damaged))[1] is None, at
    for end in range(len(sealed)):
        assert unseal(sealed[:end])[1] is None, end


@pytest.mark.parametrize(
    "change",
    [
        {"address": 0},
        {"num_bytes": 1 << 46},
        {"num_bytes": 0},
        {"slot": wire.MAX_REGIONS},
        {"slot": -1},
        {"stamp": 0},
        {"device": -1},
    ],
)
def test_facts_out_of_bounds_are_none(ledger: Ledger, change: dict[str, int]) -> None:
    region = RegionFacts(4096, 4096, 0, 0, 1)
    good = msgspec.structs.replace(ledger.facts(), regions=[region])
    assert unseal(seal(b"m", good))[1] == good
    bad = msgspec.structs.replace(good, regions=[msgspec.structs.replace(region, **change)])
    assert unseal(seal(b"m", bad)) == (b"m", None)


# The ledger.


def test_a_registration_stands_until_its_last_count(ledger: Ledger) -> None:
    memory = np.zeros(4096, np.uint8)
    for _ in range(2):
        ledger.add(span_of(memory))
    (region,) = ledger.regions(MemoryKind.HOST, 0)
    standing = Standing(ledger.words, [region])
    _, far_words = map_ledger(ledger.facts())
    far = Standing(far_words, [region])
    ledger.remove(span_of(memory))
    assert standing
    assert far
    ledger.remove(span_of(memory))
    assert not standing
    assert not far
    ledger.remove(span_of(memory))
    ledger.add(span_of(memory))
    assert not far, "another registration of the same memory is another"
    assert Standing(far_words, ledger.regions(MemoryKind.HOST, 0))


def test_facts_of_some_registrations(ledger: Ledger) -> None:
    first, second = (np.zeros(4096, np.uint8) for _ in range(2))
    for array in (first, second):
        ledger.add(span_of(array))
    assert len(ledger.facts().regions) == 2
    (region,) = ledger.facts([span_of(second), span_of(np.zeros(8, np.uint8))]).regions
    assert region.address == second.ctypes.data


def test_overlapping_memory_is_not_entered(ledger: Ledger) -> None:
    memory = np.zeros(4096, np.uint8)
    ledger.add(span_of(memory))
    with pytest.raises(RegistrationError, match="overlaps"):
        ledger.add(span_of(memory[100:200]))
    assert ledger.spans() == [span_of(memory)]


def test_device_memory_needs_cuda(ledger: Ledger) -> None:
    if _core.device_count():
        pytest.skip("there is a GPU here")
    with pytest.raises(KvxferError):
        ledger.add(Span(MemoryKind.DEVICE, 0, 4096, 4096))


def test_another_ledger_is_refused(ledger: Ledger) -> None:
    forged = msgspec.structs.replace(ledger.facts(), secret=bytes(wire.SECRET_BYTES))
    with pytest.raises(RegistrationError, match="is not the ledger"):
        map_ledger(forged)


# Peers.


def test_a_peer_in_this_process(ledger: Ledger) -> None:
    memory = np.zeros(4096, np.uint8)
    ledger.add(span_of(memory))
    with RemoteAgent("near", ledger.facts()) as peer:
        reach = peer.reach(MemoryKind.HOST, 0, -1)
        assert reach.ranges.tolist() == [[memory.ctypes.data, memory.ctypes.data + 4096, 0]]
        assert reach.attached_pid == 0
        assert Standing(peer.words, reach.regions)
        assert peer.reach(MemoryKind.HOST, 1, -1).regions == []
        peer.require_alive()
    with pytest.raises(PeerLost, match="is gone"):
        peer.require_alive()


def test_a_peer_of_another_time_is_refused(ledger: Ledger) -> None:
    own = ProcessSpec.own()
    past = msgspec.structs.replace(own, start_ticks=own.start_ticks - 1)
    with pytest.raises(PeerLost, match="reused"):
        RemoteAgent("gone", msgspec.structs.replace(ledger.facts(), process=past))


def test_a_segment_that_does_not_hold_its_region_is_refused(ledger: Ledger) -> None:
    memory = shared_empty(4096)
    ledger.add(span_of(memory))
    (region,) = ledger.facts().regions
    assert region.segment is not None
    beyond = msgspec.structs.replace(region.segment, offset_bytes=region.segment.num_bytes)
    regions = [msgspec.structs.replace(region, segment=beyond)]
    with RemoteAgent("far", msgspec.structs.replace(ledger.facts(), regions=regions)) as peer:
        peer._is_here = False  # as a peer of another process is reached
        with pytest.raises(ProtocolMismatch, match="does not lie in its segment"):
            peer.reach(MemoryKind.HOST, 0, -1)


# Lanes.


class Slow(Copy):
    """A copy of a large size that waits for a sign."""

    def __init__(self, go: threading.Event, done: list[int], number: int = 0) -> None:
        self.num_bytes = 1 << 30
        self.require_sound = lambda: None
        self._go, self._done, self._number = go, done, number

    def on_host(self, pool: _core.WorkerPool) -> None:
        assert self._go.wait(20)
        self._done.append(self._number)


def test_a_lane_keeps_the_order_and_cancels_what_waits() -> None:
    go, done = threading.Event(), []
    told: list[int] = []
    with HostLane() as lane:
        jobs = [Job(Slow(go, done, number), lambda n=number: told.append(n)) for number in range(3)]
        for job in jobs:
            lane.post(job)
        while not jobs[0]._is_begun:
            pass
        assert not jobs[0].cancel()
        assert jobs[1].cancel()
        go.set()
    assert jobs[0].state == "DONE"
    assert jobs[1].state == "ERR"
    assert done[0] == told[0] == 0
    assert 1 not in done + told


def test_a_closed_lane_refuses_and_fails_what_waits() -> None:
    go, done = threading.Event(), []
    lane = HostLane()
    first, second = (Job(Slow(go, done, number), lambda: None) for number in range(2))
    lane.post(first)
    lane.post(second)
    while not first._is_begun:
        pass
    closing = threading.Thread(target=lane.close)
    closing.start()
    while not lane._closed:
        pass
    go.set()
    closing.join(20)
    assert (first.state, second.state, done) == ("DONE", "ERR", [0])
    with pytest.raises(NotAvailable, match="closed"):
        lane.post(Job(Slow(go, done), lambda: None))


def test_a_notification_that_fails_is_an_error() -> None:
    go, done = threading.Event(), []
    go.set()

    def fail() -> None:
        raise RuntimeError("the peer has gone")

    with HostLane() as lane:
        job = Job(Slow(go, done), fail)
        lane.post(job)
        while job.state == "PROC":
            pass
    assert (job.state, done) == ("ERR", [0])


def test_a_lane_holds_nothing_of_the_past() -> None:
    go, done = threading.Event(), []
    go.set()
    with HostLane() as lane:
        copy = Slow(go, done)
        job = Job(copy, lambda: None)
        lane.post(job)
        while job.state == "PROC":
            pass
        del job

        def is_held_here_alone() -> bool:
            gc.collect()
            return sys.getrefcount(copy) == 2

        eventually(is_held_here_alone, "the lane holds a copy of the past")


# How it gets in.

_QUIET = """
import sys
from kvxfer.connectors.nixl_agent.plugin import register
register()
heavy = {"numpy", "zmq", "nixl", "nixl_cu13", "vllm", "torch", "msgspec"} & set(sys.modules)
assert not heavy, heavy
"""


def test_the_plug_in_that_is_off_imports_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", _QUIET], check=True, timeout=60, env={})


def test_the_plug_in_is_an_entry_point() -> None:
    from importlib.metadata import entry_points

    (found,) = entry_points(group="vllm.general_plugins", name="kvxfer_nixl")
    assert found.value == "kvxfer.connectors.nixl_agent.plugin:register"
    assert callable(found.load())


def known_agent() -> type:
    methods = {}
    for name, parameters in SIGNATURES.items():
        scope: dict[str, Any] = {}
        source = f"lambda {', '.join(parameters)}: None"
        methods[name] = eval(source, scope)
    return type("nixl_agent", (), methods)


def test_a_known_nixl_gives_no_complaints() -> None:
    assert complaints(VERSIONS[0], known_agent()) == []


def test_an_unknown_nixl_is_refused_in_words() -> None:
    agent = known_agent()
    agent.transfer = lambda self, handle: None  # type: ignore[attr-defined]
    del agent.check_xfer_state  # type: ignore[attr-defined]
    assert complaints("2.0", agent) == [
        f"its version is 2.0; known are {', '.join(VERSIONS)}",
        "transfer takes self, handle",
        "it has no check_xfer_state",
    ]


def test_facts_are_bounded() -> None:
    assert msgspec.json.schema(AgentFacts)["$defs"]["AgentFacts"]["properties"]["regions"][
        "maxItems"
    ] == (wire.MAX_REGIONS)


def test_a_forked_child_withdraws_nothing_of_its_parent_s() -> None:
    memory = shared_empty(4096)
    with Pairing() as pairing:
        pairing.ledger.add(span_of(np.asarray(memory)))
        before = pairing.ledger.words.copy()
        assert before.any()
        pid = os.fork()
        if pid == 0:
            pairing.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert np.array_equal(pairing.ledger.words, before)
