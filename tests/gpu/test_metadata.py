"""Metadata of device memory that a peer did not write, or wrote wrong: typed errors, no write."""

import random
from typing import Any

import msgspec
import pytest
from cache_content import shape
from gpu_pairs import DeviceChild, GpuPair, linked_devices
from mutations import mutate

from kvxfer.control import ControlClient, InitReply, InitRequest
from kvxfer.errors import KvxferError, ProtocolMismatch
from kvxfer.memory import MemoryKind
from kvxfer.session.layouts import layout_spec, rank_spec
from kvxfer.transport import Link, create_transport

NUM_MUTANTS = 300


def fetch(pair: GpuPair) -> tuple[list[bytes], bytes]:
    """The far side's regions and board, as they travel."""
    request = InitRequest(
        incarnation=pair.local.endpoint.incarnation,
        layout=layout_spec(pair.local.cache.shard.model),
        rank=rank_spec(pair.local.cache.shard.rank),
        transports=["nvlink"],
    )
    with ControlClient(pair.opened["addresses"]["init"], InitReply) as client:
        reply = client.call(request)
    return reply.regions, reply.board


def link(pair: GpuPair, regions: list[bytes], board: bytes) -> Link:
    transport = create_transport("nvlink", memory=MemoryKind.DEVICE)
    return transport.link(pair.local.cache, regions, board)


def handle_of(blob: bytes) -> Any:
    """The driver's own handle in a region's metadata; None where it cannot be read."""
    try:
        return msgspec.msgpack.decode(blob)["region"]["legacy_handle"]
    except (msgspec.MsgspecError, LookupError, TypeError):
        return None


def change(blob: bytes, **fields: Any) -> bytes:
    tree = msgspec.msgpack.decode(blob)
    tree["region"] |= fields
    return msgspec.msgpack.encode(tree)


@pytest.mark.parametrize("memory", ["cuda", "vmm"])
def test_wrong_metadata_is_refused_and_nothing_is_written(child: DeviceChild, memory: str) -> None:
    with linked_devices(child, shape(num_arrays=4), memory=memory) as pair:
        regions, board = fetch(pair)
        refusals: list[str] = []
        for number in range(NUM_MUTANTS):
            random_ = random.Random(number)
            index = random_.randrange(len(regions))
            wrong = list(regions)
            wrong[index] = mutate(regions[index], random_)
            if handle_of(wrong[index]) not in (None, handle_of(regions[index])):
                continue  # what the driver makes of a wrong handle is looked at below
            try:
                link(pair, wrong, board).close()
            except KvxferError as error:
                refusals.append(str(error))
        assert all(refusals)
        assert len(refusals) > NUM_MUTANTS // 2
        pair.put([1], [2])
        pair.check()


WRONG_HANDLES = [b"\0" * 64, b"\xff" * 64, b"x" * 63, random.Random(1).randbytes(64)]


@pytest.mark.parametrize("handle", WRONG_HANDLES, ids=["zeros", "ones", "short", "random"])
def test_a_handle_of_nobody_is_refused(child: DeviceChild, handle: bytes) -> None:
    with linked_devices(child) as pair:
        regions, board = fetch(pair)
        with pytest.raises(KvxferError):
            link(pair, [change(regions[0], legacy_handle=handle)], board)
        pair.put([1], [2])
        pair.check()


def test_a_range_outside_its_allocation_is_refused(child: DeviceChild) -> None:
    with linked_devices(child) as pair:
        regions, board = fetch(pair)
        region = msgspec.msgpack.decode(regions[0])["region"]
        size = region["chunk_bytes"][0]
        for fields in (
            {"offset_bytes": size},
            {"offset_bytes": size - region["num_bytes"] + 1},
            {"num_bytes": size + 1},
            {"offset_bytes": (1 << 46) - 1},
        ):
            with pytest.raises(ProtocolMismatch, match="passes the end of an allocation"):
                link(pair, [change(regions[0], **fields)], board)
        # A peer that overstates its allocation is found out by the driver's own figure.
        with pytest.raises(KvxferError):
            link(pair, [change(regions[0], chunk_bytes=[1 << 40], buffer_id=1 << 40)], board)
        pair.check()


def test_regions_are_of_the_process_that_owns_the_board(child: DeviceChild) -> None:
    with linked_devices(child) as pair, DeviceChild() as stranger:
        regions, board = fetch(pair)
        opened = stranger.open(shape(), memory="cuda", transport="nvlink", seed=3)
        with pair.local.endpoint.connect(opened["addresses"]):
            others, _ = fetch(GpuPair(pair.local, stranger, pair.peer, opened))
        for wrong in ([], others, [*regions, *others]):
            with pytest.raises(ProtocolMismatch, match=f"{len(wrong)} regions"):
                link(pair, wrong, board)
        assert stranger.call("problem") == ""
        pair.check()
