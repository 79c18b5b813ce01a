"""Metadata that a peer did not write, or wrote wrong: refused by a typed error, nothing written."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from cache_content import shape
from mutations import mutate
from transport_pairs import LOOPBACK, ON_ONE_HOST, SHM_PRIVATE, SHM_SHARED, LinkPair, Pair

from kvxfer.control import ControlClient, InitReply, InitRequest
from kvxfer.errors import KvxferError, NotAvailable, PeerLost, ProtocolMismatch
from kvxfer.layout import CopyPlan
from kvxfer.memory import KVCache, MemoryKind
from kvxfer.session.layouts import layout_spec, rank_spec
from kvxfer.transport import Link, Op, Transport, create_transport

NUM_MUTANTS = 2000
PROBE_BYTES = 16


def fetch(pair: Pair) -> tuple[list[bytes], bytes]:
    """The far side's regions and board, as they travel."""
    request = InitRequest(
        incarnation=pair.local.endpoint.incarnation,
        layout=layout_spec(pair.local.cache.shard.model),
        rank=rank_spec(pair.local.cache.shard.rank),
        transports=[pair.kind.transport],
    )
    with ControlClient(pair.remote_opened["addresses"]["init"], InitReply) as client:
        reply = client.call(request)
    return reply.regions, reply.board


def make_transport(pair: Pair) -> Transport:
    return create_transport(pair.kind.transport, memory=MemoryKind.HOST, num_threads=1)


def read_ends(link: Link) -> None:
    """Read the first and the last bytes of every region that a link says it reaches."""
    scratch = np.zeros(PROBE_BYTES, np.uint8)
    for address, num_bytes in zip(link.region_addresses, link.region_bytes, strict=True):
        for offset in {0, max(num_bytes - PROBE_BYTES, 0)}:
            probe = CopyPlan.contiguous(
                int(address) + offset, scratch.ctypes.data, min(PROBE_BYTES, num_bytes)
            )
            link.post(probe, Op.GET)


def fuzz(
    link: Callable[[KVCache, list[bytes], bytes], Link],
    cache: KVCache,
    regions: list[bytes],
    board: bytes,
    *,
    num_mutants: int,
) -> int:
    """Link to wrong metadata and read what links; returns how many were refused.

    Anything but a kvxfer error fails, and names the mutant by its number.
    """
    num_refused = 0
    for number in range(num_mutants):
        random_ = random.Random(number)
        wrong_regions, wrong_board = list(regions), board
        if random_.random() < 0.4:
            wrong_board = mutate(board, random_)
        else:
            index = random_.randrange(len(regions))
            wrong_regions[index] = mutate(regions[index], random_)
        try:
            with link(cache, wrong_regions, wrong_board) as made:
                read_ends(made)
        except KvxferError as error:
            if not str(error):
                raise AssertionError(f"mutant {number} is refused without a word") from error
            num_refused += 1
        except Exception as error:
            raise AssertionError(f"mutant {number}: {type(error).__name__}: {error}") from error
    return num_refused


def test_wrong_metadata_is_refused_and_nothing_is_written(
    link_pair: LinkPair,
) -> None:
    with link_pair(shape(num_arrays=4)) as pair:
        regions, board = fetch(pair)
        transport = make_transport(pair)
        num_refused = fuzz(
            transport.link, pair.local.cache, regions, board, num_mutants=NUM_MUTANTS
        )
        # Some mutants still describe the peer, another slot of its board for one.
        assert NUM_MUTANTS * 0.8 < num_refused <= NUM_MUTANTS
        pair.check_both()
        # Both sides have survived, and still find each other.
        cache = pair.remote.shape
        pair.peer.put([1], [2])
        pair.check_both(remote=cache.copied(cache.content(1), cache.content(2), [1], [2]))


def test_the_fuzz_fails_on_an_error_of_another_type(pair: Pair) -> None:
    def careless(cache: KVCache, regions: list[bytes], board: bytes) -> Link:
        for region in regions:
            msgspec.msgpack.decode(region)
        return pair.peer.link  # type: ignore[no-any-return]

    regions, board = fetch(pair)
    with pytest.raises(AssertionError, match=r"mutant \d+: DecodeError"):
        fuzz(careless, pair.local.cache, regions, board, num_mutants=NUM_MUTANTS)


def test_the_fuzz_fails_on_a_write(pair: Pair) -> None:
    def writing(cache: KVCache, regions: list[bytes], board: bytes) -> Link:
        pair.peer.put([0], [0])
        raise PeerLost("refused, but too late")

    regions, board = fetch(pair)
    fuzz(writing, pair.local.cache, regions, board, num_mutants=1)
    with pytest.raises(AssertionError, match="array 0, plane 0, block 0, byte 0"):
        pair.check_both()


@pytest.mark.parametrize("kind", ON_ONE_HOST, indirect=True, ids=str)
@pytest.mark.parametrize("count", [0, 2])
def test_regions_of_another_number_do_not_become_planes(pair: Pair, count: int) -> None:
    regions, board = fetch(pair)
    with make_transport(pair).link(pair.local.cache, regions * count, board) as link:
        assert len(link.region_addresses) == len(link.region_bytes) == count


def change(blob: bytes, **fields: Any) -> bytes:
    """Metadata with fields replaced; a field of a nested map by ``outer__inner``."""
    tree = msgspec.msgpack.decode(blob)
    for name, value in fields.items():
        *outer, last = name.split("__")
        holder = tree
        for key in outer:
            holder = holder[key]
        holder[last] = value
    return msgspec.msgpack.encode(tree)


@pytest.mark.parametrize("kind", [SHM_SHARED], indirect=True, ids=str)
def test_a_region_may_not_reach_past_its_segment(pair: Pair) -> None:
    regions, board = fetch(pair)
    transport, cache = make_transport(pair), pair.local.cache
    num_bytes = msgspec.msgpack.decode(regions[0])["num_bytes"]
    segment = msgspec.msgpack.decode(regions[0])["segment"]
    beyond = segment["num_bytes"] - segment["offset_bytes"] + 1
    with pytest.raises(ProtocolMismatch, match=f"region of {beyond} bytes does not lie in"):
        transport.link(cache, [change(regions[0], num_bytes=beyond)], board)
    with pytest.raises(ProtocolMismatch, match=f"region of {num_bytes} bytes does not lie in"):
        transport.link(
            cache, [change(regions[0], segment__offset_bytes=segment["num_bytes"])], board
        )


@pytest.mark.parametrize("kind", [SHM_SHARED], indirect=True, ids=str)
def test_a_second_region_may_not_enlarge_the_segment_of_the_first(pair: Pair) -> None:
    regions, board = fetch(pair)
    lie = change(regions[0], segment__num_bytes=1 << 40, segment__offset_bytes=1 << 39)
    with pytest.raises(ProtocolMismatch, match=f"for one region and {1 << 40} for another"):
        make_transport(pair).link(pair.local.cache, [regions[0], lie], board)


@pytest.mark.parametrize("kind", [SHM_SHARED, SHM_PRIVATE], indirect=True, ids=str)
def test_a_region_of_another_process_than_the_board_is_refused(pair: Pair) -> None:
    regions, board = fetch(pair)
    other = change(regions[0], process__pid=1)
    with pytest.raises(ProtocolMismatch, match="name different processes"):
        make_transport(pair).link(pair.local.cache, [other], board)


@pytest.mark.parametrize("kind", ON_ONE_HOST, indirect=True, ids=str)
def test_metadata_of_a_process_that_is_not_the_one_here_is_refused(pair: Pair) -> None:
    regions, board = fetch(pair)
    transport, cache = make_transport(pair), pair.local.cache
    process = msgspec.msgpack.decode(board)["process"]
    for fields, error, message in [
        ({"process__start_ticks": process["start_ticks"] - 1}, PeerLost, "its id was reused"),
        ({"process__pid_namespace": 1}, NotAvailable, "lives in another pid namespace"),
    ]:
        # Region and board agree, so that only the process itself can tell.
        with pytest.raises(error, match=message):
            transport.link(cache, [change(regions[0], **fields)], change(board, **fields))


@pytest.mark.parametrize("kind", [SHM_PRIVATE], indirect=True, ids=str)
def test_private_memory_is_reached_only_by_the_cookie_in_it(pair: Pair) -> None:
    regions, board = fetch(pair)
    transport, cache = make_transport(pair), pair.local.cache
    with pytest.raises(PeerLost, match="was withdrawn"):
        transport.link(cache, [change(regions[0], cookie=bytes(16))], board)
    with pytest.raises(KvxferError, match="process_vm_readv"):
        transport.link(cache, [change(regions[0], cookie_address=16)], board)


@pytest.mark.parametrize("kind", [LOOPBACK], indirect=True, ids=str)
def test_loopback_takes_no_address_off_the_wire(pair: Pair) -> None:
    regions, board = fetch(pair)
    secret = np.zeros(4096, np.uint8)
    forged = change(regions[0], address=secret.ctypes.data, num_bytes=secret.nbytes)
    with pytest.raises(PeerLost, match="was withdrawn, or never exported"):
        make_transport(pair).link(pair.local.cache, [forged], board)
