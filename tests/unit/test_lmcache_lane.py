"""The order in which a lane commits, waits and takes back; the peer is a stand-in."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from lmcache_stand_in import GivenUp, Peer
from waiting import GUARD_S, eventually

from kvxfer.connectors.lmcache.lane import Job, Lane, hold_until_over
from kvxfer.connectors.lmcache.wire import Grant, Hello
from kvxfer.errors import (
    ControlTimeout,
    InvalidUsage,
    PeerLost,
    TransferFailed,
    TransferTimeout,
)
from kvxfer.transport import Op, Tuning


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def lane(peer: Peer) -> Iterator[Lane]:
    endpoint: Any = peer

    with Lane("p", endpoint, hello, tuning=Tuning(), connect_timeout_s=1.0) as made:
        yield made


def hello() -> Hello:
    return Hello(addresses={})


def begin(lane: Lane, name: str, granted_to: Any = None) -> Job:
    plan: Any = lambda address, pages: name  # noqa: E731
    job = Job(plan, 1, Op.PUT, Grant(id=name, incarnation="receiver"), granted_to)
    lane.submit(job)
    return job


def send(lane: Lane, name: str, granted_to: Any = None) -> int:
    return begin(lane, name, granted_to).done.result(GUARD_S)


def test_a_grant_is_committed_while_its_bytes_are_on_their_way(lane: Lane, peer: Peer) -> None:
    assert send(lane, "g") == 1
    assert peer.calls == ["post g", "commit g 1", "poll 1"]


def test_a_batch_is_done_once_its_transfer_has_ended(lane: Lane, peer: Peer) -> None:
    peer.polls_left = 2
    assert send(lane, "g") == 1
    assert peer.calls == ["post g", "commit g 1", "poll 1", "poll 1", "poll 1"]


def test_pages_granted_to_a_connection_that_ended_are_not_written(lane: Lane, peer: Peer) -> None:
    assert send(lane, "g", granted_to=peer) == 1
    peer.calls.clear()
    with pytest.raises(PeerLost, match="has ended, and the pages with it"):
        send(lane, "h", granted_to=Peer())
    assert peer.calls == ["abort h"]


def test_a_peer_that_was_started_anew_is_met_anew_whatever_the_link_sees(
    lane: Lane, peer: Peer
) -> None:
    peer.incarnation = "before"
    with pytest.raises(PeerLost, match="was started anew since"):
        send(lane, "g")
    assert "post g" not in peer.calls
    peer.incarnation = "receiver"
    assert send(lane, "h") == 1
    assert send(lane, "i") == 1
    assert peer.num_met == 2


def test_a_refused_commit_waits_for_the_transfer_all_the_same(lane: Lane, peer: Peer) -> None:
    peer.failing["commit g 1"] = ControlTimeout("planted")
    with pytest.raises(ControlTimeout, match="planted"):
        send(lane, "g")
    assert peer.calls == ["post g", "commit g 1", "poll 1", "abort g"]


def test_a_transfer_that_fails_after_its_commit_is_taken_back(lane: Lane, peer: Peer) -> None:
    peer.failing["poll 1"] = TransferFailed("planted")
    with pytest.raises(TransferFailed, match="planted"):
        send(lane, "g")
    assert peer.calls[-1] == "abort g"
    send(lane, "h")
    assert peer.calls[4:] == ["post h", "commit h 2", "poll 2"]


def test_pages_of_what_was_given_up_are_told_of_once_nothing_moves(lane: Lane, peer: Peer) -> None:
    peer.failing["post g"] = TransferTimeout("planted")
    peer.given_up = GivenUp(peer, 3)
    with pytest.raises(TransferTimeout, match="planted"):
        send(lane, "g")
    assert peer.calls == ["post g", "moves on", "moves on", "moves on", "abort g"]


def test_a_lane_whose_connection_cannot_be_closed_yet_is_closed_later(
    lane: Lane, peer: Peer
) -> None:
    send(lane, "g")
    peer.failing["close"] = TransferTimeout("it moves")
    lane.close()
    del peer.failing["close"]
    lane.close()
    assert peer.calls[-2:] == ["close", "close"]


def test_a_lane_that_is_retired_unmaps_by_itself_once_nothing_moves(lane: Lane, peer: Peer) -> None:
    peer.over.clear()
    job = begin(lane, "g")
    eventually(lambda: "poll 1" in peer.calls, "nothing is posted")
    lane.retire()
    with pytest.raises(InvalidUsage, match="is closed"):
        send(lane, "h")
    assert not job.done.done()
    assert "close" not in peer.calls
    peer.over.set()
    assert job.done.result(GUARD_S) == 1
    eventually(lambda: peer.calls[-1] == "close", "the peer is not unmapped")


def test_a_peer_that_is_met_while_its_lane_is_closed_is_unmapped(peer: Peer) -> None:
    is_greeting, go = threading.Event(), threading.Event()

    def greet() -> Hello:
        is_greeting.set()
        assert go.wait(GUARD_S)
        return hello()

    endpoint: Any = peer
    lane = Lane("p", endpoint, greet, tuning=Tuning(), connect_timeout_s=1.0)
    meeting, closing = threading.Thread(target=lane.connect), threading.Thread(target=lane.close)
    meeting.start()
    assert is_greeting.wait(GUARD_S)
    closing.start()
    closing.join(0.2)  # it must not be over yet
    go.set()
    for thread in (meeting, closing):
        thread.join(GUARD_S)
    assert (peer.num_met, peer.calls) == (1, ["close"])


def test_pages_that_nobody_waits_for_are_held_until_their_job_is_over(
    lane: Lane, peer: Peer
) -> None:
    peer.over.clear()
    moving, queued = begin(lane, "g"), begin(lane, "h")
    eventually(lambda: "poll 1" in peer.calls, "nothing is posted")
    free: list[str] = []
    hold_until_over(moving.done, lambda: free.append("g"))
    hold_until_over(queued.done, lambda: free.append("h"))
    assert free == ["h"]
    peer.over.set()
    eventually(lambda: free == ["h", "g"], "pages stay held")
    eventually(lambda: peer.calls[-1] == "abort h", "a grant is not given back")


def test_nothing_is_posted_before_what_failed_is_taken_back(lane: Lane, peer: Peer) -> None:
    # A later transfer's number would tell the receiver that the failed one had ended too.
    peer.failing |= {"poll 1": TransferFailed("planted"), "abort g": ControlTimeout("deaf")}
    with pytest.raises(TransferFailed, match="planted"):
        send(lane, "g")
    with pytest.raises(ControlTimeout, match="deaf"):
        send(lane, "h")
    assert "post h" not in peer.calls
    del peer.failing["abort g"]
    before = len(peer.calls)
    send(lane, "i")
    assert peer.calls[before:] == ["abort g", "post i", "commit i 2", "poll 2"]


def test_a_lane_goes_on_whatever_an_abort_raises(lane: Lane, peer: Peer) -> None:
    send(lane, "g")
    peer.failing["abort h"] = OSError("planted")
    cancelled = Job(lambda *_: None, 1, Op.PUT, Grant(id="h"))  # type: ignore[arg-type, return-value]
    assert cancelled.done.cancel()
    lane.submit(cancelled)
    with pytest.raises(OSError, match="planted"):
        send(lane, "i")  # it is to be taken back first
    peer.failing.clear()
    assert send(lane, "j") == 1


def test_who_distrusts_its_peer_meets_it_anew(lane: Lane, peer: Peer) -> None:
    send(lane, "g")
    met: Any = peer
    lane.distrust(met)
    send(lane, "h")
    assert peer.num_met == 2
    stranger: Any = Peer()
    lane.distrust(stranger)  # the connection was another one
    send(lane, "i")
    assert peer.num_met == 2
