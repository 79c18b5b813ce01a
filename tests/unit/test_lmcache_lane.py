"""The order in which a lane commits, waits and takes back; the peer is a stand-in."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.connectors.lmcache.lane import Job, Lane
from kvxfer.connectors.lmcache.wire import Grant
from kvxfer.errors import ControlTimeout, PeerLost, TransferFailed, TransferTimeout
from kvxfer.transport import Op, Tuning

WAIT_S = 10.0


class GivenUp:
    """What a link has given up and cannot end at once."""

    def __init__(self, peer: "Peer", polls_left: int) -> None:
        self._peer, self._polls_left = peer, polls_left

    def poll(self, timeout_s: float) -> bool:
        self._peer.calls.append("moves on")
        self._polls_left -= 1
        if self._polls_left:
            return False
        self._peer.given_up = None
        raise TransferFailed("it has ended")


class Peer:
    """A peer and its link: notes what is called, and fails where a test says so."""

    connection = "sender"

    def __init__(self) -> None:
        self.incarnation = "receiver"
        self.num_met = 0
        self.calls: list[str] = []
        self.failing: dict[str, Exception] = {}
        self.sequence = 0
        self.polls_left = 0
        self.given_up: GivenUp | None = None
        self.link = self.view = self
        self.addresses, self.num_blocks, self.num_bytes = {(0, 0): 1}, 8, 4096
        self.actual_path = "nowhere"

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.failing:
            raise self.failing[call]

    def require_open(self) -> None:
        """It always is."""

    def post(self, plan: str, op: Op, **_: object) -> "Peer":
        self._note(f"post {plan}")
        self.sequence += 1
        return self

    def poll(self, timeout_s: float) -> bool:
        self._note(f"poll {self.sequence}")
        self.polls_left -= 1
        return self.polls_left < 0

    def commit(self, grant: str, sequence: int) -> None:
        self._note(f"commit {grant} {sequence}")

    def abort(self, grant: str) -> None:
        self._note(f"abort {grant}")

    def connect(self, *_: object, **__: object) -> "Peer":
        self.num_met += 1
        return self

    def close(self) -> None:
        self._note("close")


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def lane(peer: Peer) -> Iterator[Lane]:
    endpoint: Any = peer

    class Hello:
        addresses = ()

    greet: Any = Hello
    with Lane("p", endpoint, greet, tuning=Tuning(), connect_timeout_s=1.0) as made:
        yield made


def send(lane: Lane, name: str, granted_to: Any = None) -> int:
    plan: Any = lambda address, pages: name  # noqa: E731
    job = Job(plan, 1, Op.PUT, Grant(id=name, incarnation="receiver"), granted_to)
    lane.submit(job)
    return job.done.result(WAIT_S)


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
