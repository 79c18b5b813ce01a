"""Caches in GPUs' memory over NIXL and UCX: through slots there or in host memory, and in place.

Between two processes that share one GPU; tests/multi_gpu has the same for two.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import cuda_driver
import device_rank_host
import pytest
from cache_content import CacheShape, shape
from contract_cases import CASES
from device_rank_host import DeviceRankHost
from gpu_needs import array_library
from gpu_pairs import DeviceChild, GpuPair, linked_devices
from peer_process import DEADLINE_S, ChildProcess
from stream_race import ALL_BLOCKS, race
from stream_race import CACHE as RACED
from transport_pairs import NIXL, UCX, Kind, require_available

from kvxfer.errors import InvalidUsage, KvxferError, PeerLost
from kvxfer.transport import Op, Transport, Tuning
from kvxfer.transport.nixl import NixlTransport
from kvxfer.transport.ucx import UcxTransport

MIB = 1 << 20
STALL_S = 5.0
# What a path says of each.
WAYS = {
    "nixl, device slots": "device slots",
    "nixl, host slots": "host slots",
    "ucx": "pinned host slots",
}
NIXL_WAY = "nixl, device slots"


def linked(
    child: DeviceChild, cache: CacheShape, way: str = NIXL_WAY, **options: Any
) -> AbstractContextManager[GpuPair]:
    near: Transport
    if way == "ucx":
        require_available(UCX)
        near = UcxTransport(2, stall_s=STALL_S)
    else:
        require_available(NIXL)
        in_device = None if way == NIXL_WAY else False
        near = NixlTransport(2, in_device=in_device, stall_s=STALL_S)
    return linked_devices(child, cache, transport=near.name, local_transport=near, **options)


SHAPES = {
    "pages of 128 bytes": shape(num_blocks=256),
    "pages of 24 KiB": shape(head_dim=96, block_size=64, num_blocks=200),
    "pages of 21 bytes": shape(
        num_layers=3, num_kv_heads=1, head_dim=21, block_size=1, dtype="uint8", kv="mla"
    ),
    # More bytes than all slots of either kind have.
    "many slots": shape(num_layers=4, num_kv_heads=8, head_dim=128, num_blocks=4096),
    "pages of 2 MiB": shape(
        num_layers=1, num_kv_heads=8, head_dim=128, block_size=1024, num_blocks=8
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHAPES)
def test_staged_pages_arrive_and_nothing_else(child: DeviceChild, name: str, way: str) -> None:
    cache = SHAPES[name]
    ids = list(range(cache.num_blocks))
    ours, theirs = ids[::2], ids[1::2]  # what the far side gets, and what it is asked for
    with linked(child, cache, way) as pair:
        tuning = Tuning(engine="staged")
        assert WAYS[way] in pair.put(ours, ours[::-1], tuning=tuning)
        pair.check()
        assert WAYS[way] in pair.get(theirs, theirs[::-1], tuning=tuning)
        pair.check()


def test_long_pages_travel_in_place(child: DeviceChild) -> None:
    cache = SHAPES["pages of 2 MiB"]
    with linked(child, cache) as pair:
        for path in (pair.put([0, 5], [6, 1]), pair.get([0, 5], [6, 1])):
            assert "slots" not in path
        pair.check()
        assert "device slots" in pair.put([2], [2], tuning=Tuning(engine="staged"))
        pair.check()


def test_the_path_between_processes_of_one_host_is_cuda_ipc(child: DeviceChild) -> None:
    with linked(child, shape()) as pair:
        assert pair.put([0], [1]) == "nixl UCX by cuda_ipc, WRITE, device slots"
        assert pair.get([0], [1]) == "nixl UCX by cuda_ipc, READ, device slots"
        pair.check()


@pytest.mark.parametrize("way", WAYS)
def test_sm_budgets_are_kept_and_told(child: DeviceChild, way: str) -> None:
    with linked(child, shape(), way) as pair:
        transfer = pair.peer.put([0], [1], tuning=Tuning(num_sms=3))
        assert transfer.num_sms == 3
        assert pair.peer.put([0], [1]).num_sms > 0


def test_more_sms_than_there_are_are_refused_and_the_link_stands(child: DeviceChild) -> None:
    with linked(child, shape(), "ucx") as pair:
        with pytest.raises(InvalidUsage, match="num_sms is 100000; GPU"):
            pair.peer.put([0], [1], tuning=Tuning(num_sms=100000))
        pair.put([0], [1])
        pair.check()


def test_memory_that_cannot_be_mapped_goes_through_slots(child: DeviceChild) -> None:
    cache = SHAPES["pages of 2 MiB"]
    with linked(child, cache, memory="vmm") as pair:
        assert "device slots" in pair.put([0, 5], [6, 1], tuning=Tuning(engine="direct"))
        pair.check()


def test_transfers_of_no_pages_are_told(child: DeviceChild) -> None:
    with linked(child, shape()) as pair:
        pair.put([], [])
        assert pair.signalled(1)
        pair.put([0], [1])
        assert pair.signalled(2)
        assert not pair.signalled(3)
        pair.check()


# Re-sharding and fp8.


@pytest.fixture(scope="module")
def far_ranks() -> Iterator[list[ChildProcess]]:
    program = Path(device_rank_host.__file__)
    ranks = [ChildProcess(program) for _ in range(4)]
    yield ranks
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("kind", [NIXL, UCX], ids=lambda kind: kind.transport)
@pytest.mark.parametrize("op", Op, ids=lambda op: op.value)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_exactly_its_bytes(
    far_ranks: list[ChildProcess], name: str, op: Op, kind: Kind
) -> None:
    require_available(kind)
    case = CASES[name]
    sides = (case.src, case.dst) if op is Op.PUT else (case.dst, case.src)
    how: dict[str, Any] = {"case": name, "memory": "cuda:0", "transport": kind.transport}
    far = far_ranks[: len(sides[1].ranks)]
    with ExitStack() as stack:
        addresses = []
        for rank, process in enumerate(far):
            opened = process.call("open", rank=rank, is_source=op is Op.GET, **how)
            stack.callback(process.release)
            addresses.append(opened["addresses"])
        near = []
        for rank in sides[0].ranks:
            near.append(DeviceRankHost())
            stack.callback(near[-1].close)
            near[-1].open(rank=rank, is_source=op is Op.PUT, **how)
            group = stack.enter_context(
                near[-1].endpoint.connect_all(addresses, convert=case.conversion)
            )
            post = group.put if op is Op.PUT else group.get
            post(case.src.table(), case.dst.table(), tokens=case.tokens, layers=case.layers).wait(
                DEADLINE_S
            )
        assert [rank.problem() for rank in near] == [""] * len(near)
        assert [rank.call("problem") for rank in far] == [""] * len(far)


# Order behind streams.


@pytest.mark.parametrize("way", WAYS)
def test_a_put_waits_for_the_stream_that_writes_its_source(child: DeviceChild, way: str) -> None:
    torch = array_library("torch")
    with linked(child, RACED, way, local_memory="torch") as pair:
        race(torch, pair, torch.cuda.Stream(), num_rounds=5)


def test_rows_in_place_wait_for_the_stream_too(child: DeviceChild) -> None:
    torch = array_library("torch")

    def put_in_place(pair: GpuPair, stream: int) -> Any:
        tuning = Tuning(engine="direct")
        return pair.peer.put(ALL_BLOCKS, ALL_BLOCKS, after=stream, tuning=tuning)

    with linked(child, RACED, local_memory="torch") as pair:
        race(torch, pair, torch.cuda.Stream(), num_rounds=5, post=put_in_place)


def test_the_race_fails_without_the_order(child: DeviceChild) -> None:
    torch = array_library("torch")

    def put_unordered(pair: GpuPair, _: int) -> Any:
        return pair.peer.put(ALL_BLOCKS, ALL_BLOCKS)

    with linked(child, RACED, local_memory="torch") as pair:
        with pytest.raises(AssertionError, match=r"round \d+: \d+ pages are of an earlier round"):
            race(torch, pair, torch.cuda.Stream(), num_rounds=5, post=put_unordered)
        cuda_driver.synchronize(0)


# Ends.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", Op, ids=lambda op: op.value)
def test_a_killed_peer_is_lost_and_the_next_one_served(
    child: DeviceChild, op: Op, way: str
) -> None:
    cache = SHAPES["many slots"]
    ids = list(range(cache.num_blocks))
    with linked(child, cache, way) as pair:
        post = pair.peer.put if op is Op.PUT else pair.peer.get
        post(ids, ids)
        child.kill()
        with pytest.raises(KvxferError) as caught:
            post(ids, ids)
        assert isinstance(caught.value, PeerLost)
    with DeviceChild() as other, linked(other, shape(), way) as pair:
        pair.put([0], [1])
        pair.check()


@pytest.mark.parametrize("way", WAYS)
def test_connections_leave_no_memory_on_the_gpu(child: DeviceChild, way: str) -> None:
    with linked(child, shape(), way) as pair:

        def cycle() -> None:
            with pair.local.endpoint.connect(pair.opened["addresses"]) as peer:
                peer.put([0], [1])

        for _ in range(3):
            cycle()
        before = cuda_driver.free_bytes(0)
        for _ in range(10):
            cycle()
        assert cuda_driver.free_bytes(0) >= before - 64 * MIB


def test_a_thread_without_a_context_posts(child: DeviceChild) -> None:
    contexts: list[int] = []
    with linked(child, shape()) as pair:

        def work() -> None:
            contexts.append(cuda_driver.current_context())
            pair.put([0], [1])

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(DEADLINE_S)
        assert contexts == [0]
        pair.check()
