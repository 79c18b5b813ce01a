"""`nixl` between GPUs that are pretended: what lies around the kernels and NIXL's own paths.

Everything runs but the GPUs (`pretend_gpus`); tests/gpu does the same with real ones.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cache_content import CacheShape, shape
from peer_process import DEADLINE_S, InThisProcess
from pretend_gpus import Pretended, PretendHost, pretend_gpus
from transport_pairs import LOCAL_SEED, NIXL, REMOTE_SEED, Pair, require_available

from kvxfer.errors import InvalidUsage, NotAvailable, TransferTimeout
from kvxfer.transport import Tuning
from kvxfer.transport.nixl import NixlTransport, server, staging
from kvxfer.transport.nixl.staging import Place, SlotShape

SLOTS = {"device slots": True, "host slots": False}
CACHE = shape(num_layers=4, num_kv_heads=4, head_dim=64, block_size=16, num_blocks=64)
IDS = list(range(CACHE.num_blocks))
STALL_S = 1.0


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    require_available(NIXL)
    for place in (Place.PINNED, Place.DEVICE):
        monkeypatch.setitem(staging.SHAPES, place, SlotShape(4, 1 << 18))
    return pretend_gpus(monkeypatch)


@contextmanager
def linked(
    in_device: bool | None = None, cache: CacheShape = CACHE, devices: tuple[int, int] = (0, 1)
) -> Iterator[Pair]:
    """A cache on each of two GPUs of this process, linked."""
    local, remote = PretendHost(devices[0]), InThisProcess(PretendHost(devices[1]))
    try:
        opened = remote.open(cache, memory="device", transport="nixl", seed=REMOTE_SEED)
        local.open(
            layout=cache.fields,
            num_blocks=cache.num_blocks,
            num_arrays=cache.num_arrays,
            memory="device",
            transport=NixlTransport(2, in_device=in_device),
            seed=LOCAL_SEED,
        )
        with local.endpoint.connect(opened["addresses"]) as peer:
            yield Pair(NIXL, local, remote, peer, opened)
    finally:
        local.close()
        remote.close()


@pytest.mark.parametrize("slots", SLOTS)
def test_pages_go_both_ways_through_slots(gpus: Pretended, slots: str) -> None:
    with linked(SLOTS[slots]) as pair:
        put = pair.peer.put(IDS, IDS[::-1])
        assert slots in put.actual_path
        assert put.num_sms > 0
        near, far = CACHE.content(LOCAL_SEED), CACHE.content(REMOTE_SEED)
        far = CACHE.copied(near, far, IDS, IDS[::-1])
        pair.check_both(remote=far)
        get = pair.peer.get([3, 5], [6, 1], tuning=Tuning(num_sms=3))
        assert get.num_sms == 3
        pair.check_both(remote=far, local=CACHE.copied(far, near, [3, 5], [6, 1]))
    assert gpus.contexts == [0, 0]
    assert gpus.live_bytes == 0


def test_what_names_the_path_is_what_was_taken(gpus: Pretended) -> None:
    staged, direct = Tuning(engine="staged"), Tuning(engine="direct")
    with linked() as pair:
        put, get = pair.peer.put, pair.peer.get
        name = "nixl UCX by cuda_ipc"
        assert put([0], [1], tuning=staged).actual_path == f"{name}, WRITE, device slots"
        assert get([0], [1], tuning=staged).actual_path == f"{name}, READ, device slots"
        in_place = put([0], [1], tuning=direct)
        assert in_place.actual_path == f"{name}, WRITE"
        assert in_place.num_sms == 0
    with linked(in_device=False) as pair:
        name = "nixl UCX by pinned host memory, as asked"
        for tuning in (staged, direct):
            path = pair.peer.put([0], [1], tuning=tuning).actual_path
            assert path == f"{name}, WRITE, host slots"


def test_memory_that_no_other_process_can_map_goes_through_slots(gpus: Pretended) -> None:
    gpus.has_legacy_ipc = False
    with linked() as pair:
        path = pair.peer.put([0], [1], tuning=Tuning(engine="direct")).actual_path
        assert path == "nixl UCX by cuda_ipc, WRITE, device slots"
        near, far = CACHE.content(LOCAL_SEED), CACHE.content(REMOTE_SEED)
        pair.check_both(remote=CACHE.copied(near, far, [0], [1]))


def test_gpus_without_peer_access_use_host_memory_and_say_so(
    gpus: Pretended, caplog: pytest.LogCaptureFixture
) -> None:
    gpus.peers = False
    with caplog.at_level(logging.WARNING), linked() as pair:
        path = pair.peer.put([0], [1]).actual_path
        assert path == "nixl UCX by pinned host memory, WRITE, host slots"
    assert "pass through pinned host memory: GPU 0 has no peer access to GPU 1" in caplog.text


def test_a_side_in_host_memory_meets_one_on_a_gpu(gpus: Pretended) -> None:
    with linked(devices=(-1, 1)) as pair:
        path = pair.peer.put([0], [1]).actual_path
        assert path == "nixl UCX by pinned host memory, WRITE, host slots"
        near, far = CACHE.content(LOCAL_SEED), CACHE.content(REMOTE_SEED)
        pair.check_both(remote=CACHE.copied(near, far, [0], [1]))


@pytest.mark.parametrize("engine", ["direct", "staged"])
def test_nothing_is_read_before_the_stream_has_written_it(gpus: Pretended, engine: str) -> None:
    with linked() as pair:
        done: list[Any] = []

        def put() -> None:
            done.append(pair.peer.put([0], [1], after=7, tuning=Tuning(engine=engine)))

        thread = threading.Thread(target=put)
        thread.start()
        try:
            while not gpus.marks:
                assert thread.is_alive()
            pair.local.fill(5)  # what the stream does
        finally:
            for mark in gpus.marks:
                mark.reached.set()
            thread.join(DEADLINE_S)
        assert len(done) == 1
        near, far = CACHE.content(5), CACHE.content(REMOTE_SEED)
        pair.check_both(local=near, remote=CACHE.copied(near, far, [0], [1]))


def test_a_stream_that_goes_nowhere_is_given_up_and_nothing_was_sent(gpus: Pretended) -> None:
    with linked() as pair:
        pair.peer.link._stall_s = STALL_S  # type: ignore[attr-defined]
        try:
            with pytest.raises(TransferTimeout, match=f"did not end within {STALL_S} s"):
                pair.peer.put([0], [1], after=7)
        finally:
            for mark in gpus.marks:
                mark.reached.set()
        pair.check_both()
        pair.peer.put([0], [1])
        near, far = CACHE.content(LOCAL_SEED), CACHE.content(REMOTE_SEED)
        pair.check_both(remote=CACHE.copied(near, far, [0], [1]))


def test_slots_in_a_gpus_memory_are_bounded(
    gpus: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MAX_DEVICE_BYTES", 2 << 20)  # of two connections
    with linked() as pair:
        addresses = pair.remote_opened["addresses"]
        with pair.local.endpoint.connect(addresses) as second:
            with pytest.raises(NotAvailable, match="2 connections have their slots"):
                pair.local.endpoint.connect(addresses)
            second.put([0], [1])
        with pair.local.endpoint.connect(addresses) as third:
            third.put([0], [1])
    assert gpus.live_bytes == 0


def test_one_transport_serves_one_gpu(gpus: Pretended) -> None:
    transport = NixlTransport(2)
    first, second = PretendHost(0), PretendHost(1)
    args: dict[str, Any] = {
        "layout": CACHE.fields,
        "num_blocks": CACHE.num_blocks,
        "num_arrays": 1,
        "memory": "device",
        "transport": transport,
    }
    try:
        first.open(**args, seed=1)
        with pytest.raises(InvalidUsage, match="memory of CUDA device 1 with an endpoint of devic"):
            second.open(**args, seed=2)
    finally:
        first.close()
        second.close()
