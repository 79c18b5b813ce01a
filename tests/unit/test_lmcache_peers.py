"""Who comes to the init port while pages are moved; endpoints and their peers are stand-ins."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from free_ports import free_port
from lmcache_stand_in import Peer
from waiting import GUARD_S, eventually

from kvxfer.connectors.lmcache import peers as peers_module
from kvxfer.connectors.lmcache.greeting import greet
from kvxfer.connectors.lmcache.lane import Job, Lane
from kvxfer.connectors.lmcache.options import Options
from kvxfer.connectors.lmcache.peers import Peers
from kvxfer.connectors.lmcache.setting import Setting
from kvxfer.connectors.lmcache.stock import StockChannel
from kvxfer.connectors.lmcache.wire import Hello
from kvxfer.transport import Op

ANSWER_S = 20.0  # shorter than what a lane waits for its end


class Endpoint:
    """Meets one peer, whoever is asked for."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.addresses: dict[str, str] = {}
        self.is_meeting, self.go = threading.Event(), threading.Event()
        self.go.set()

    def connect(self, *_: object, **__: object) -> Peer:
        self.is_meeting.set()
        assert self.go.wait(GUARD_S)
        return self._peer

    def close(self) -> None:
        self._peer.calls.append("end of the endpoint")


class Side:
    """The peers of one pool, and one of them that is called b."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peer = Peer()
        self.endpoint = Endpoint(self.peer)
        monkeypatch.setattr(peers_module, "serve", lambda *_, **__: self.endpoint)
        self._at = f"127.0.0.1:{free_port()}"
        no_pool: Any = None
        stock = StockChannel(lambda: None, is_async=False, timeout_s=1.0)
        self.peers = Peers(Setting(options=Options(peers="kvxfer")), no_pool, stock, self._at)

    def hear_from_b(self) -> None:
        """As one process after the other does that has this name."""
        assert greet(self._at, Hello(addresses={}, local_id="b"), bytes, ANSWER_S) is not None

    @property
    def lane(self) -> Lane:
        """How pages get to b."""
        lane = self.peers.lane_to("b")
        assert lane is not None
        return lane

    def begin(self) -> Job:
        """Write to b, which goes on until it is over."""
        self.peer.over.clear()
        plan: Any = lambda address, pages: "pages"  # noqa: E731
        job = Job(plan, 1, Op.PUT)
        self.lane.submit(job)
        eventually(lambda: "poll 1" in self.peer.calls, "nothing is posted")
        return job


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    made = Side(monkeypatch)
    made.hear_from_b()
    yield made
    made.peer.over.set()
    made.peers.close()


def test_a_successor_is_answered_while_pages_of_before_still_move(side: Side) -> None:
    job, before = side.begin(), side.lane
    side.peer.is_lost = True
    side.hear_from_b()
    assert not job.done.done()
    assert side.lane is not before
    side.peer.over.set()
    assert job.done.result(GUARD_S) == 1
    eventually(lambda: "close" in side.peer.calls, "the peer of before stays mapped")


def test_the_endpoint_stays_until_pages_of_before_do_not_move(side: Side) -> None:
    side.begin()
    side.peer.is_lost = True
    side.hear_from_b()
    closing = threading.Thread(target=side.peers.close)
    closing.start()
    closing.join(0.2)  # it must not be over yet
    side.peer.over.set()
    closing.join(GUARD_S)
    assert side.peer.calls[-2:] == ["close", "end of the endpoint"]


def test_who_comes_while_it_is_being_met_is_met(side: Side) -> None:
    side.endpoint.go.clear()
    lane = side.lane
    meeting = threading.Thread(target=lane.connect)
    meeting.start()
    assert side.endpoint.is_meeting.wait(GUARD_S)
    side.hear_from_b()
    side.endpoint.go.set()
    meeting.join(GUARD_S)
    assert side.lane is lane
    assert lane.is_open
    assert side.peers.can_reach("b")
