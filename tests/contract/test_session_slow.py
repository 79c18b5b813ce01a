"""A peer that takes its bytes slowly holds up its own requests, no others and no signs of life."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from session_sides import check_received, here, open_receiver, sides
from sessions import BLOCKS, Session, session, signs_of_life, with_args
from waiting import eventually

from kvxfer.errors import PeerLost, TransferFailed, TransferTimeout
from kvxfer.layout import CopyPlan
from kvxfer.transport import loopback

__all__ = ["session"]  # the fixture

GUARD_S = 30.0


class Held:
    """Copies into the cache of one session, which stand still until they are let go."""

    def __init__(self, session: Session) -> None:
        buffer = session.host(session.far).cache.registrations[0].buffer
        self.addresses = range(buffer.address, buffer.address + buffer.num_bytes)
        self.num_begun = 0
        self.gate = threading.Event()

    def hold(self, plan: CopyPlan) -> None:
        if int(plan.dst_planes[0]) in self.addresses:
            self.num_begun += 1
            self.gate.wait(GUARD_S)


@pytest.fixture
def held(session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(session)
    copy_mapped = loopback.copy_mapped

    def slowly(pool: Any, plan: CopyPlan, engine: str) -> str:
        made.hold(plan)
        return copy_mapped(pool, plan, engine)

    monkeypatch.setattr(loopback, "copy_mapped", slowly)
    yield made
    made.gate.set()


def test_a_copy_that_takes_long_silences_nobody(
    session: Session, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    signs = signs_of_life(session, monkeypatch)
    slow = session.send("slow")
    eventually(lambda: held.num_begun == 1, "the copy has begun")
    with sides(here()) as (other,):
        to = open_receiver(other, transport="loopback", memory="private")
        session.sender.send("quick", BLOCKS, to=to).wait(GUARD_S)
        assert other.call("notice")["ok"]
    num_signs = len(signs)
    eventually(lambda: len(signs) >= num_signs + 3, "the sender is silent")
    assert session.receiver.poll(0.0) is None
    held.gate.set()
    slow.wait(GUARD_S)
    notice = session.notice()
    assert notice.ok
    check_received(session.far, BLOCKS, list(notice.block_ids))


def test_a_slow_request_can_be_cancelled_and_is_waited_for(session: Session, held: Held) -> None:
    handle = session.send("slow")
    eventually(lambda: held.num_begun == 1, "the copy has begun")
    handle.cancel()
    assert not handle.poll(0.3), "its blocks may still be read"
    assert session.receiver.poll(0.0) is None
    held.gate.set()
    with pytest.raises(TransferFailed, match="'slow' was cancelled"):
        handle.wait(GUARD_S)
    assert not session.notice().ok
    assert session.receiver.num_free_blocks == 16


def test_no_more_than_two_copies_are_posted_at_a_time(session: Session, held: Held) -> None:
    handle = session.sender.send_layers("slow", BLOCKS, to=session.to)
    handle.layer(0)
    eventually(lambda: held.num_begun == 1, "the copy has begun")
    others = [session.send(f"next-{number}", [number]) for number in range(4)]
    eventually(lambda: session.receiver.num_free_blocks == 16 - 3 - 4, "all have their blocks")
    handle.layer(1)
    (target,) = session.sender._targets.values()
    eventually(lambda: bool(target.poster.is_full), "as many are posted as may be")
    time.sleep(0.2)
    assert sum(len(one.in_flight) for one in session.sender._deliveries) == 2
    held.gate.set()
    for one in (handle, *others):
        one.wait(GUARD_S)
    assert all(session.notice().ok for _ in range(5))


@with_args({}, {"limits": {"drain_s": 0.3}})
def test_a_copy_to_a_peer_that_is_gone_may_still_be_read(
    session: Session, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = session.send("slow")
    eventually(lambda: held.num_begun == 1, "the copy has begun")
    (target,) = session.sender._targets.values()
    gone = PeerLost("its process has ended")
    monkeypatch.setattr("kvxfer.session.target.end_of", lambda peer: gone)
    with pytest.raises(TransferTimeout, match="keep its blocks: they may still be read"):
        handle.wait(GUARD_S)
    assert target.is_lost
    held.gate.set()
    eventually(lambda: target.is_idle, "the peer is left once the copy has ended")


@with_args({}, {"limits": {"drain_s": 0.3, "abort_s": 0.2}})
def test_a_sender_closes_though_a_copy_stands_still(session: Session, held: Held) -> None:
    handle = session.send("slow")
    eventually(lambda: held.num_begun == 1, "the copy has begun")
    posters = [one for one in threading.enumerate() if one.name == "kvxfer-poster"]
    session.sender.close()
    with pytest.raises(TransferTimeout, match="keep its blocks: they may still be read"):
        handle.wait(GUARD_S)
    held.gate.set()
    for one in posters:
        one.join(GUARD_S)
        assert not one.is_alive()
