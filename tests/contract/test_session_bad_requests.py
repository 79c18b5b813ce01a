"""What is wrong with one request, or fails in passing, fails that one: the sender serves on."""

import errno
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from descriptors import few_descriptors
from session_sides import here, open_receiver, sides
from sessions import Session, session, with_args
from waiting import eventually

from kvxfer.control.calls import Calls
from kvxfer.errors import InvalidUsage, NotAvailable, TransferFailed
from kvxfer.session.delivery import Delivery
from kvxfer.session.target import Target

__all__ = ["session"]  # the fixture

GUARD_S = 20.0
LOCAL = {"transport": "loopback", "memory": "private"}


def check_serves_on(session: Session) -> None:
    session.send("next").wait(GUARD_S)
    assert session.notice().request_id == "next"


def error_of(call: Callable[[], object]) -> str:
    """What it is not available for; empty where it is."""
    try:
        call()
    except NotAvailable as error:
        return str(error)
    return ""


def by_name(addresses: dict[str, str]) -> dict[str, str]:
    return {name: url.replace("127.0.0.1", "localhost") for name, url in addresses.items()}


# What is judged at once.


@pytest.mark.parametrize("request_id", ["", "x" * 257, "\ud800a", 7, None, b"a"])
def test_a_name_that_no_receiver_can_be_told(session: Session, request_id: Any) -> None:
    with pytest.raises(InvalidUsage, match=r"request id .*; use a str of 1 to 256 characters"):
        session.send(request_id)
    check_serves_on(session)


@pytest.mark.parametrize("request_id", ["a\0b", "é" * 256])
def test_any_other_name_arrives(session: Session, request_id: str) -> None:
    session.send(request_id).wait(GUARD_S)
    assert session.notice().request_id == request_id


@pytest.mark.parametrize("channel", ["init", "alloc"])
@pytest.mark.parametrize(
    "address", ["garbage", "tcp://[fe80::1%eth0]:5", "tcp://no.such.host.invalid:5", 5, b"x"]
)
def test_an_address_that_is_none(session: Session, channel: str, address: Any) -> None:
    with pytest.raises((InvalidUsage, NotAvailable)):
        session.sender.send("r-1", [1], to={**session.to, channel: address})
    assert session.sender.num_open == 0
    check_serves_on(session)


@pytest.mark.parametrize("to", [None, "tcp://127.0.0.1:5", [], [None], 5])
def test_a_destination_that_is_none(session: Session, to: Any) -> None:
    with pytest.raises(InvalidUsage, match=r"is no rank; pass the `addresses`|pass at least one"):
        session.sender.send("r-1", [1], to=to)
    check_serves_on(session)


def test_more_tokens_than_a_receiver_can_be_asked_for(session: Session) -> None:
    handle = session.sender.begin("r-1", to=session.to, tokens=range(1 << 40))
    with pytest.raises(InvalidUsage, match=r"takes \d+ blocks at its receiver, the limit is"):
        handle.wait(GUARD_S)
    check_serves_on(session)


# Names.


def befall(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Run ``call`` before each look-up of a name."""
    find = socket.getaddrinfo

    def look_up(host: Any, *args: Any, **options: Any) -> Any:
        call()
        return find(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_a_name_is_looked_up_once_a_request_by_who_sends_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    # And so a resolver that takes its time holds up nobody else.
    threads: list[threading.Thread] = []
    befall(monkeypatch, lambda: threads.append(threading.current_thread()))
    session.sender.send("r-1", [1], to=by_name(session.to)).wait(GUARD_S)
    assert threads == [threading.current_thread()]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_a_look_up_that_fails_is_not_the_last(
    session: Session, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    left = [number]

    def fail() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    befall(monkeypatch, fail)
    for turn in range(1, 6):
        send = partial(session.sender.send, f"r-{turn}", [1], to=by_name(session.to))
        error = error_of(lambda send=send: send().wait(GUARD_S))
        assert ("'localhost' has no address" in error) == (turn == number), error
        assert turn == number or session.notice().ok
    check_serves_on(session)


# What fails on the sender's thread.


@pytest.mark.parametrize("num_left", [0, 1, 4, 8, 12])
def test_a_want_of_descriptors_passes(session: Session, num_left: int) -> None:
    session.send("known").wait(GUARD_S)
    with sides(here()) as (other,):
        to = open_receiver(other, **LOCAL)
        with few_descriptors(num_left):
            handle = session.sender.send("r-1", [1], to=to)
            time.sleep(0.2)
        # It may be just then that it is seen whether the peer can be mapped.
        error = error_of(lambda: handle.wait(GUARD_S))
        assert not error or "Too many open files" in error
        session.sender.send("r-2", [1], to=to).wait(GUARD_S)
    assert session.notice().request_id == "known"
    check_serves_on(session)


@with_args({}, {"limits": {"connect_s": 0.3}})
@pytest.mark.parametrize("num_lines", range(4))
def test_without_any_the_error_says_so(
    session: Session, monkeypatch: pytest.MonkeyPatch, num_lines: int
) -> None:
    left = [num_lines]
    open_line = Calls.open

    def scarce(self: Calls, *args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise NotAvailable("Too many open files", errno.EMFILE)
        return open_line(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Calls, "open", scarce)
        with pytest.raises(NotAvailable, match="Too many open files"):
            session.send("r-1").wait(GUARD_S)
    session.host(session.near).limit(connect_s=GUARD_S)
    check_serves_on(session)
    assert session.receiver.num_free_blocks == 13


@pytest.mark.parametrize("name", ["_on_reserve", "_on_reserved", "_on_commit", "_go_on"])
def test_a_fault_of_a_delivery_is_its_own(
    session: Session, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    good = session.sender.begin("good", to=session.to, tokens=range(12))
    step = getattr(Delivery, name)
    left = [1]

    def fail(self: Delivery, *args: Any) -> None:
        if self.request_id == "bad" and left:
            left.pop()
            raise KeyError("a fault")
        step(self, *args)

    monkeypatch.setattr(Delivery, name, fail)
    with pytest.raises(TransferFailed, match="request 'bad': KeyError: 'a fault'"):
        session.send("bad").wait(GUARD_S)
    good.push([3, 1, 7])
    good.finish()
    good.wait(GUARD_S)
    told = [session.notice() for _ in range(1 if name == "_on_reserve" else 2)]
    assert {one.request_id: one.ok for one in told}["good"]
    assert not any(one.quarantined for one in told)


@pytest.mark.parametrize("name", ["_heard", "_met", "_go_on"])
def test_a_fault_of_a_connection_passes(
    session: Session, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    step = getattr(Target, name)
    left = [1]

    def fail(self: Target, *args: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise KeyError("a fault")
        step(self, *args)

    monkeypatch.setattr(Target, name, fail)
    handle = session.sender.begin("r-1", to=session.to, tokens=range(12))
    if name == "_heard":
        session.receiver.abort("r-1")
    else:
        handle.push([3, 1, 7])
        handle.finish()
    # Met anew, the receiver may refuse what it has heard the end of.
    with suppress(TransferFailed):
        handle.wait(GUARD_S)
    session.send("next").wait(GUARD_S)
    while (notice := session.notice()).request_id != "next":
        assert not notice.quarantined


def test_a_sender_that_fails_itself_says_so_to_both_sides(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = session.sender.begin("r-1", to=session.to, tokens=range(12))
    eventually(lambda: session.receiver.num_free_blocks < 16, "it was never granted")
    run, left = Calls.run, [1]

    def fail(self: Calls, timeout_s: float) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise KeyError("a fault")
        run(self, timeout_s)

    monkeypatch.setattr(Calls, "run", fail)
    handle.push([3], tokens=range(4))  # and with it a turn
    with pytest.raises(TransferFailed, match=r"the sender failed: KeyError\('a fault'\)"):
        handle.wait(GUARD_S)
    notice = session.notice()
    assert (notice.ok, notice.quarantined) == (False, False)
    assert session.receiver.num_free_blocks == 16
    with pytest.raises(InvalidUsage, match="closed"):
        session.send("r-2")
