"""Blocks of a peer's pool: reserve, then commit or abort, over the alloc channel."""

import threading
from collections.abc import Callable

import pytest
from cache_content import shape
from peer_host import PeerHost
from transport_pairs import SHM_SHARED, LinkPair, Pair

from kvxfer.errors import InvalidUsage, KvxferError, RegistrationError, TransferTimeout

GUARD_S = 20.0

# What carries the bytes has no part in this; one kind of two processes stands for all.
pytestmark = pytest.mark.parametrize("kind", [SHM_SHARED], indirect=True, ids=str)


def test_reserved_blocks_are_filled_and_committed(pair: Pair) -> None:
    ids = pair.peer.reserve("r-1", 5)
    assert ids.dtype.name == "int64"
    assert len(set(ids.tolist())) == 5
    assert set(ids.tolist()) <= set(range(16))
    local_ids = [11, 3, 8, 0, 15]
    pair.peer.put(local_ids, ids).wait(GUARD_S)
    pair.peer.commit("r-1")
    assert pair.remote.call("num_free") == 11
    cache = pair.remote.shape
    pair.check_both(
        remote=cache.copied(cache.content(1), cache.content(2), local_ids, ids.tolist())
    )


def test_a_commit_that_names_a_transfer_is_refused_until_that_is_visible(pair: Pair) -> None:
    ids = pair.peer.reserve("r-1", 1)
    transfer = pair.peer.put([0], ids)
    transfer.wait(GUARD_S)
    with pytest.raises(InvalidUsage, match="not visible yet"):
        pair.peer.commit("r-1", transfer.sequence + 1)
    pair.peer.abort("r-1")  # nothing was taken, so it can be given back
    assert pair.remote.call("num_free") == 16
    ids = pair.peer.reserve("r-2", 1)
    transfer = pair.peer.put([0], ids)
    transfer.wait(GUARD_S)
    pair.peer.commit("r-2", transfer.sequence)
    assert pair.remote.call("num_free") == 15


def test_two_requests_never_share_a_block(pair: Pair) -> None:
    one, two = pair.peer.reserve("one", 9), pair.peer.reserve("two", 7)
    assert sorted([*one.tolist(), *two.tolist()]) == list(range(16))


def test_abort_gives_the_blocks_back(pair: Pair) -> None:
    pair.peer.reserve("r-1", 16)
    assert pair.remote.call("num_free") == 0
    pair.peer.abort("r-1")
    assert pair.remote.call("num_free") == 16
    assert len(pair.peer.reserve("r-2", 16)) == 16


def test_calls_may_be_repeated_when_their_outcome_is_unknown(pair: Pair) -> None:
    first = pair.peer.reserve("r-1", 4)
    assert pair.peer.reserve("r-1", 4).tolist() == first.tolist()
    assert pair.remote.call("num_free") == 12
    pair.peer.abort("r-1")
    pair.peer.abort("r-1")
    pair.peer.abort("never reserved")
    assert pair.remote.call("num_free") == 16
    pair.peer.reserve("r-2", 4)
    pair.peer.commit("r-2")
    pair.peer.commit("r-2")
    assert pair.remote.call("num_free") == 12


def test_committed_blocks_are_freed_by_the_far_engine_alone(pair: Pair) -> None:
    pair.peer.reserve("r-1", 4)
    pair.peer.commit("r-1")
    pair.peer.abort("r-1")
    assert pair.remote.call("num_free") == 12
    for _ in range(2):
        pair.remote.call("release", connection=pair.peer.connection, request_id="r-1")
        assert pair.remote.call("num_free") == 16


def test_equal_ids_of_two_connections_are_two_requests(pair: Pair) -> None:
    first = pair.peer.reserve("r-1", 3).tolist()
    with pair.local.endpoint.connect(pair.remote_opened["addresses"]) as second:
        other = second.reserve("r-1", 3).tolist()
        assert not set(first) & set(other)
        assert second.reserve("r-1", 3).tolist() == other
        assert pair.peer.reserve("r-1", 3).tolist() == first
        second.commit("r-1")
        pair.peer.abort("r-1")
        assert pair.remote.call("num_free") == 13


def test_equal_ids_of_two_endpoints_are_two_requests(pair: Pair) -> None:
    cache = shape(num_blocks=1)
    near = PeerHost()
    near.open(
        layout=cache.fields, num_blocks=1, num_arrays=1, memory="private", transport="shm", seed=3
    )
    try:
        with near.endpoint.connect(pair.remote_opened["addresses"]) as second:
            one, two = pair.peer.reserve("r-1", 3), second.reserve("r-1", 3)
            assert not set(one.tolist()) & set(two.tolist())
            second.abort("r-1")
            assert pair.peer.reserve("r-1", 3).tolist() == one.tolist()
            assert pair.remote.call("num_free") == 13
    finally:
        near.close()


def test_a_repeat_of_another_size_is_refused(pair: Pair) -> None:
    pair.peer.reserve("r-1", 4)
    with pytest.raises(InvalidUsage, match="'r-1' already holds 4 blocks and wants 5"):
        pair.peer.reserve("r-1", 5)
    assert pair.remote.call("num_free") == 12


def test_a_full_pool_is_waited_for_until_the_deadline(pair: Pair) -> None:
    pair.peer.reserve("holder", 10)
    with pytest.raises(TransferTimeout, match="7 blocks for request 'late' were not free within"):
        pair.peer.reserve("late", 7, timeout_s=0.1)
    # All or nothing: the request that waited in vain holds none of the six that were free.
    assert pair.remote.call("num_free") == 6
    assert len(pair.peer.reserve("small", 6)) == 6


def test_a_waiting_request_gets_what_another_gives_back(link_pair: LinkPair, pair: Pair) -> None:
    held = pair.peer.reserve("holder", 16).tolist()
    granted: list[list[int]] = []
    with pair.local.endpoint.connect(pair.remote_opened["addresses"]) as second:

        def wait_for_blocks() -> None:
            granted.append(second.reserve("waiter", 16, timeout_s=GUARD_S).tolist())

        waiter = threading.Thread(target=wait_for_blocks, daemon=True)
        waiter.start()
        # Seen to wait: it holds nothing while the other has all.
        waiter.join(0.1)
        assert waiter.is_alive()
        assert not granted
        pair.peer.abort("holder")
        waiter.join(GUARD_S)
    assert [sorted(ids) for ids in granted] == [sorted(held)]


def test_a_request_for_more_than_the_pool_is_refused_at_once(pair: Pair) -> None:
    with pytest.raises(InvalidUsage, match="wants 17 blocks of a pool of 16; it can never"):
        pair.peer.reserve("r-1", 17, timeout_s=GUARD_S)


def test_a_request_of_no_blocks_is_granted_none(pair: Pair) -> None:
    assert pair.peer.reserve("r-1", 0).tolist() == []
    pair.peer.commit("r-1")
    assert pair.remote.call("num_free") == 16


@pytest.mark.parametrize("num_blocks", [-1, 1 << 21, 1 << 62])
def test_an_absurd_number_of_blocks_is_refused(pair: Pair, num_blocks: int) -> None:
    with pytest.raises(KvxferError, match=r"num_blocks"):
        pair.peer.reserve("r-1", num_blocks, timeout_s=GUARD_S)
    assert pair.remote.call("num_free") == 16


@pytest.mark.parametrize("request_id", ["", "x" * 257])
def test_an_absurd_request_id_is_refused(pair: Pair, request_id: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: pair.peer.reserve(request_id, 1),
        lambda: pair.peer.commit(request_id),
        lambda: pair.peer.abort(request_id),
    ]
    for call in calls:
        with pytest.raises(KvxferError, match="request_id"):
            call()


def test_a_commit_without_a_reservation_is_refused(pair: Pair) -> None:
    with pytest.raises(InvalidUsage, match="'r-1' holds no blocks; reserve them first"):
        pair.peer.commit("r-1")
    pair.peer.reserve("r-1", 2)
    pair.peer.abort("r-1")
    with pytest.raises(InvalidUsage, match="holds no blocks"):
        pair.peer.commit("r-1")


def test_the_same_request_a_thousand_times_uses_up_nothing(pair: Pair) -> None:
    for turn in range(1000):
        pair.peer.reserve("same prompt", 3)
        if turn % 2:
            pair.peer.commit("same prompt")
            connection = pair.peer.connection
            pair.remote.call("release", connection=connection, request_id="same prompt")
        else:
            pair.peer.abort("same prompt")
    assert pair.remote.call("num_free") == 16
    assert len(pair.peer.reserve("all", 16)) == 16


def test_a_reservation_under_an_old_epoch_is_refused(link_pair: LinkPair, pair: Pair) -> None:
    ports = {
        name: int(address.rpartition(":")[2])
        for name, address in pair.remote_opened["addresses"].items()
    }
    # The same process registers other memory and serves it at the same addresses.
    pair.remote.call("close")
    pair.remote.open(shape(), seed=5, memory="shared", transport="shm", ports=ports)
    with pytest.raises(RegistrationError, match=r"epoch \d+ of this cache is over.*connect again"):
        pair.peer.reserve("r-1", 1)
    assert pair.remote.call("num_free") == 16
