"""A receiver whose engine's scheduler chooses the blocks."""

import time

import pytest
from session_sides import check_received
from sessions import BLOCKS, Session, session, with_args
from waiting import eventually

from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.session.states import Sending

__all__ = ["session"]  # the fixture


@with_args({"scheduler": "later"})
def test_a_scheduler_may_answer_later(session: Session) -> None:
    host = session.host(session.far)
    handle = session.send()
    while "r-1" not in host.deferred:
        time.sleep(0.001)
    assert not handle.poll(0.1)
    with pytest.raises(InvalidUsage, match="give 3 blocks"):
        host.grant("r-1", [1])
    with pytest.raises(InvalidUsage, match="repeat or are outside 0 to 15"):
        host.grant("r-1", [1, 2, 16])
    assert host.grant("r-1", [4, 15, 0])
    handle.wait(20.0)
    assert session.notice().block_ids == (4, 15, 0)
    check_received(session.far, BLOCKS, [4, 15, 0])
    with pytest.raises(InvalidUsage, match="answered before"):
        host.grant("r-1", [4, 15, 0])


@with_args({"scheduler": "later"})
def test_a_scheduler_that_has_the_beginning_gets_the_rest(session: Session) -> None:
    host = session.host(session.far)
    handle = session.send()
    while "r-1" not in host.deferred:
        time.sleep(0.001)
    assert host.grant("r-1", [9], first_token=8)
    handle.wait(20.0)
    notice = session.notice()
    assert (notice.block_ids, notice.first_token) == ((9,), 8)
    check_received(session.far, [BLOCKS[2]], [9])
    assert handle.num_bytes == 4 * 128
    whole = session.send("r-2")
    while "r-2" not in host.deferred:
        time.sleep(0.001)
    assert host.grant("r-2", [], first_token=12)
    whole.wait(20.0)
    assert session.notice().block_ids == ()


@with_args({"scheduler": "later"})
def test_a_scheduler_sees_all_requests_and_may_take_the_last_first(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Calls that are not answered would be made again after this, and let others come through.
    monkeypatch.setattr("kvxfer.session.delivery._CALL_S", 100.0)
    host = session.host(session.far)
    names = [f"r-{number}" for number in range(40)]
    handles = {name: session.send(name) for name in names}
    eventually(lambda: len(host.deferred) == len(names), "the scheduler has not seen them all")
    for name in reversed(names):
        assert host.grant(name, [4, 15, 0])
        handles[name].wait(20.0)
        notice = session.notice()
        assert (notice.request_id, notice.ok) == (name, True)


@with_args({"scheduler": "later"})
def test_who_lost_its_peer_while_it_waited_has_nothing_to_ask(session: Session) -> None:
    session.send()
    eventually(lambda: bool(session.sender._deliveries), "it is not on its way")
    (delivery,) = session.sender._deliveries
    eventually(lambda: delivery.next_s < delivery.machine.end_s, "it is not told to wait")
    session.far.close()
    eventually(lambda: delivery.machine.state is Sending.CONNECTING, "the peer is not missed")
    assert delivery.next_s == delivery.machine.end_s


@with_args({"scheduler": "later", "limits": {"wait_s": 0.2}})
def test_an_answer_that_comes_too_late_is_told_so(session: Session) -> None:
    host = session.host(session.far)
    handle = session.send()
    with pytest.raises(NotAvailable, match="it was waiting for too long"):
        handle.wait(20.0)
    assert not session.notice().ok
    assert not host.grant("r-1", [1, 2, 3])


@with_args({"scheduler": "first"})
def test_a_scheduler_cannot_give_blocks_that_are_written(session: Session) -> None:
    first = session.sender.send_layers("first", BLOCKS, to=session.to)
    first.layer(0)
    while session.receiver.num_open == 0:
        time.sleep(0.001)
    with pytest.raises(NotAvailable, match="block 0 for request 'second' may still be written"):
        session.send("second").wait(20.0)
    first.layer(1)
    first.wait(20.0)


@pytest.mark.parametrize(
    ("session", "text"),
    [
        (({"scheduler": "never"}, {}), "no room for strangers"),
        (({"scheduler": "breaks"}, {}), "a fault of the scheduler"),
    ],
    indirect=["session"],
)
def test_a_scheduler_that_refuses_or_fails_is_heard_at_the_sender(
    session: Session, text: str
) -> None:
    with pytest.raises(NotAvailable, match=text):
        session.send().wait(20.0)
    assert text in session.notice().reason
