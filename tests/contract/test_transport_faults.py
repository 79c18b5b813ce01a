"""Peers that die, come back, or close what they offered: typed errors, no crash, no stray byte."""

from collections.abc import Callable

import pytest
from cache_content import check_content, shape
from peer_host import PeerHost
from peer_process import ChildProcess
from transport_pairs import SHM_PRIVATE, SHM_SHARED, Kind, LinkPair, Pair, linked

from kvxfer import Peer
from kvxfer.errors import ControlTimeout, InvalidUsage, PeerLost, RegistrationError
from kvxfer.transport import board as board_module

two_processes = pytest.mark.parametrize("kind", [SHM_SHARED, SHM_PRIVATE], indirect=True, ids=str)
MISSING_S = 0.3  # how long to look for a peer that is known not to be there


def posts(peer: Peer) -> list[Callable[[], object]]:
    return [
        lambda: peer.put([0], [1]),
        lambda: peer.get([0], [1]),
        lambda: peer.put([], []),
    ]


def check_refuses_to_copy(pair: Pair, error: type[Exception], match: str) -> None:
    for post in posts(pair.peer):
        with pytest.raises(error, match=match):
            post()
    check_content(pair.local.shape, pair.local.content(), pair.local.shape.content(1))


@two_processes
def test_a_killed_peer_is_lost_before_and_after_it_is_reaped(kind: Kind) -> None:
    with ChildProcess() as child, linked(kind, child) as pair:
        pair.peer.put([0], [1])
        child.kill()
        check_refuses_to_copy(pair, PeerLost, str(child.pid))
        child.reap()
        check_refuses_to_copy(pair, PeerLost, str(child.pid))


@two_processes
def test_a_killed_peer_answers_nothing_within_the_deadline(kind: Kind) -> None:
    with ChildProcess() as child:
        far = child.open(shape(), seed=2, memory=kind.memory, transport=kind.transport)
        local = PeerHost()
        local.open(
            layout=shape().fields,
            num_blocks=4,
            num_arrays=1,
            memory=kind.memory,
            transport=kind.transport,
            seed=1,
        )
        with local.endpoint.connect(far["addresses"]) as peer:
            peer._deadline_s = MISSING_S
            child.kill()
            child.reap()
            for call in (
                lambda: peer.reserve("r", 1, timeout_s=MISSING_S),
                lambda: peer.commit("r"),
                lambda: peer.abort("r"),
                lambda: local.endpoint.connect(far["addresses"], deadline_s=MISSING_S),
            ):
                # Which of the two depends on whether the end of the connection was noticed before.
                gone = r"tcp://127\.0\.0\.1:\d+ (is not done|ended the connection)"
                with pytest.raises((ControlTimeout, PeerLost), match=gone):
                    call()
        local.close()


@two_processes
def test_a_successor_at_the_same_addresses_is_another_peer(kind: Kind) -> None:
    with ChildProcess() as child, linked(kind, child) as pair:
        pair.peer.put([0], [1])
        addresses = pair.remote_opened["addresses"]
        ports = {name: int(url.rpartition(":")[2]) for name, url in addresses.items()}
        child.kill()
        child.reap()
        with ChildProcess() as successor:
            args = {"memory": kind.memory, "transport": kind.transport}
            opened = successor.open(shape(), seed=7, ports=ports, **args)
            assert opened["addresses"] == addresses
            assert opened["incarnation"] != pair.peer.incarnation
            check_refuses_to_copy(pair, PeerLost, str(child.pid))
            with pytest.raises(RegistrationError, match="connect again"):
                pair.peer.reserve("r", 1)
            assert successor.call("num_free") == 16
            cache = shape()
            with pair.local.endpoint.connect(addresses) as met:
                assert met.incarnation == opened["incarnation"]
                met.put([2], [3])
            expected = cache.copied(cache.content(1), cache.content(7), [2], [3])
            check_content(cache, successor.content(), expected)


def test_this_process_may_restart_its_own_side(pair: Pair) -> None:
    # The far side keeps serving while the near one closes and comes back as another incarnation.
    pair.peer.put([0], [1])
    first = pair.local.endpoint.incarnation
    pair.peer.close()
    pair.local.close()
    successor = PeerHost()
    cache = shape()
    successor.open(
        layout=cache.fields,
        num_blocks=16,
        num_arrays=1,
        memory=pair.kind.memory,
        transport=pair.kind.transport,
        seed=9,
    )
    assert successor.endpoint.incarnation != first
    with successor.endpoint.connect(pair.remote_opened["addresses"]) as peer:
        peer.put([4], [5])
        # Its transfers count from one again, on a slot that is not its predecessor's.
        assert pair.remote.call(
            "wait", incarnation=successor.endpoint.incarnation, sequence=1, timeout_s=0.0
        )
        assert not pair.remote.call(
            "wait", incarnation=successor.endpoint.incarnation, sequence=2, timeout_s=0.0
        )
    expected = cache.copied(cache.content(1), cache.content(2), [0], [1])
    expected = cache.copied(cache.content(9), expected, [4], [5])
    check_content(cache, pair.remote.content(), expected)
    successor.close()


def test_a_peer_whose_registration_is_closed_is_refused(pair: Pair) -> None:
    pair.peer.put([0], [1])
    pair.remote.call("close_cache")
    with pytest.raises(RegistrationError, match="no longer registered"):
        pair.peer.reserve("r", 1)
    check_refuses_to_copy(pair, PeerLost, "has closed the cache of this link; connect again")
    with pytest.raises(RegistrationError, match="no longer registered"):
        pair.local.endpoint.connect(pair.remote_opened["addresses"])
    cache = pair.remote.shape
    pair.check_both(remote=cache.copied(cache.content(1), cache.content(2), [0], [1]))


def test_a_peer_whose_endpoint_is_closed_is_refused(link_pair: LinkPair) -> None:
    with link_pair() as pair:
        pair.peer.put([0], [1])
        pair.remote.call("close_endpoint")
        check_refuses_to_copy(pair, PeerLost, "has closed the cache of this link; connect again")
        # Which of the two depends on whether the end of the connection was noticed before.
        with pytest.raises((ControlTimeout, PeerLost), match=r"is not done|ended the connection"):
            pair.peer.reserve("r", 1, timeout_s=MISSING_S)
        cache = pair.remote.shape
        pair.check_both(remote=cache.copied(cache.content(1), cache.content(2), [0], [1]))


def test_memory_that_a_peer_gave_back_is_not_written(pair: Pair) -> None:
    # The far side drops its arrays and makes others, which may lie where the old ones did.
    pair.peer.put([0], [1])
    pair.remote.call("close")
    pair.remote.open(shape(), seed=8, memory=pair.kind.memory, transport=pair.kind.transport)
    check_refuses_to_copy(pair, PeerLost, "has closed the cache of this link; connect again")
    check_content(shape(), pair.remote.content(), shape().content(8))


def test_a_closed_cache_of_this_side_sends_nothing(pair: Pair) -> None:
    pair.local.cache.close()
    for post in posts(pair.peer):
        with pytest.raises(RegistrationError, match="no longer registered"):
            post()
    pair.check_both()


def test_a_closed_peer_sends_nothing(pair: Pair) -> None:
    pair.peer.close()
    pair.peer.close()
    for post in posts(pair.peer):
        with pytest.raises(InvalidUsage, match="this link is closed; connect again"):
            post()
    with pytest.raises(InvalidUsage, match="closed"):
        pair.peer.reserve("r", 1)
    pair.check_both()


def test_an_unknown_incarnation_cannot_be_waited_for(pair: Pair) -> None:
    with pytest.raises(InvalidUsage, match="no peer of incarnation 'nobody' has connected"):
        pair.local.endpoint.wait("nobody", 1, timeout_s=0.0)


def test_any_number_of_successors_may_connect(pair: Pair) -> None:
    num_slots = 64
    cache = shape(num_blocks=1)
    for turn in range(num_slots + 1):
        near = PeerHost()
        near.open(
            layout=cache.fields,
            num_blocks=1,
            num_arrays=1,
            memory="private",
            transport=pair.kind.transport,
            seed=turn,
        )
        try:
            near.endpoint.connect(pair.remote_opened["addresses"]).close()
        finally:
            near.close()


def test_a_peer_that_left_and_lost_its_slot_stands_in_nobodys_way(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This side serves: its board is full, of slots that nobody opened in time.
    endpoint = pair.local.endpoint
    while endpoint._board.has_free_slot:
        endpoint._board.take_slot()
    endpoint._idle["gone"] = None
    monkeypatch.setattr(board_module, "_OPEN_WITHIN_S", 0.0)
    slot = endpoint._slot_of("new")
    assert endpoint._slots == {"new": slot}
    assert not endpoint._idle
