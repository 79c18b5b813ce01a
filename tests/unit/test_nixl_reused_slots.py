"""When the slots of a connection of `nixl` serve the next one, or are kept; a stand-in agent."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from waiting import GUARD_S, eventually

from kvxfer.errors import PeerLost, TransferTimeout
from kvxfer.memory.buffer import as_buffer
from kvxfer.transport.board import Board
from kvxfer.transport.nixl import NixlTransport, server, wire
from kvxfer.transport.nixl.memory import Range
from kvxfer.transport.nixl.server import Server
from kvxfer.transport.nixl.slots import ABANDONED
from kvxfer.transport.nixl.staging import SlotShape
from kvxfer.transport.nixl.waiting import Mailbox
from kvxfer.transport.nixl.wire import Kind, Message
from kvxfer.transport.process import ProcessSpec
from kvxfer.tuning import Section


class StandIn:
    """An agent whose peers are the test."""

    def __init__(self) -> None:
        self.mail = Mailbox()
        self.sent: list[Message] = []
        self.registered: list[Range] = []
        self.lost: set[str] = set()

    def pump(self) -> bool:
        return False

    def send(self, name: str, message: Message) -> None:
        if name in self.lost:
            raise PeerLost("it is not reached")
        if message.connection != bytes(wire.ID_BYTES):
            self.sent.append(message)

    def know(self, name: str, metadata: bytes, *, may_replace: bool) -> None:
        assert not may_replace

    def forget(self, name: str) -> None:
        """Nothing is known."""

    def metadata(self, memory: Range) -> bytes:
        return b"metadata"

    def register(self, memory: Range) -> None:
        self.registered.append(memory)

    def deregister(self, memory: Range) -> None:
        self.registered.remove(memory)


class Served:
    """A server, and what a peer says to it."""

    def __init__(self) -> None:
        self.agent, self.board = StandIn(), Board()
        self.page = np.zeros(4096, np.uint8)
        section = Section(transport="nixl", memory="private")
        self.server = Server(self.agent, self.board, 1, "host", section)  # type: ignore[arg-type]
        self.server.add_region(as_buffer(self.page))

    def ask(
        self, key: bytes, kind: Kind, expect: Kind, *, peer: str = "peer", **fields: Any
    ) -> Message:
        self.agent.sent.clear()
        self.agent.mail.put(peer, Message(key, kind, **fields))
        eventually(lambda: bool(self.agent.sent), f"{kind.name} is not answered")
        assert self.agent.sent[0].kind is expect
        return self.agent.sent[0]

    def hello(self, slot: int) -> bytes:
        process = ProcessSpec.own()
        secret, metadata = self.server.secret, b"metadata"
        hello = wire.Hello(wire.VERSION, secret, slot, process, "elsewhere", False, metadata)
        return msgspec.msgpack.encode(hello)

    def enter(self, key: bytes) -> int:
        """Connect; where the slots are."""
        body = self.hello(self.board.take_slot())
        welcome = self.ask(key, Kind.HELLO, Kind.WELCOME, body=body)
        return wire.read_body(welcome, wire.Welcome).address

    def leave(self, key: bytes) -> None:
        self.agent.mail.put("peer", Message(key, Kind.LEAVE))
        eventually(lambda: key not in self.server._connections, "it does not leave")

    @property
    def num_registered(self) -> int:
        return len(self.agent.registered)


ONE, TWO = b"1" * wire.ID_BYTES, b"2" * wire.ID_BYTES


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    try:
        yield made
    finally:
        made.server.close()
        assert made.num_registered == 0, "slots stay registered"


def test_the_next_connection_gets_the_slots(served: Served) -> None:
    address = served.enter(ONE)
    served.leave(ONE)
    served.leave(ONE)  # of nobody any more
    assert served.num_registered == 1
    assert served.enter(TWO) == address
    assert served.num_registered == 1


def test_of_two_that_leave_one_is_kept(served: Served) -> None:
    assert served.enter(ONE) != served.enter(TWO)
    served.leave(ONE)
    served.leave(TWO)
    assert served.num_registered == 1


def test_slots_of_another_shape_are_given_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.enter(ONE)
    served.leave(ONE)
    (before,) = served.agent.registered
    monkeypatch.setattr(server, "shape_of", lambda *_: SlotShape(2, 1 << 20))
    served.enter(TWO)
    (after,) = served.agent.registered
    assert (before.num_bytes, after.num_bytes) == (8 << 20, 2 << 20)


def test_who_leaves_amid_a_transfer_may_still_write_there(served: Served) -> None:
    served.enter(ONE)
    served.ask(ONE, Kind.BEGIN, Kind.GO, number=1)
    served.leave(ONE)
    assert served.num_registered == 0


def test_who_was_refused_amid_a_transfer_may_still_write_there(served: Served) -> None:
    served.enter(ONE)
    served.ask(ONE, Kind.BEGIN, Kind.GO, number=1)
    served.ask(ONE, Kind.SCATTER, Kind.FAIL, number=1, slot=99)
    served.leave(ONE)
    assert served.num_registered == 0


def test_a_slot_of_the_board_is_anothers_until_it_left_or_is_not_reached(served: Served) -> None:
    slot = served.board.take_slot()
    body = served.hello(slot)
    served.ask(ONE, Kind.HELLO, Kind.WELCOME, body=body)
    refused = served.ask(TWO, Kind.HELLO, Kind.FAIL, peer="other", body=body)
    fail = wire.read_body(refused, wire.Fail)
    assert fail.error == "PeerLost"  # who connects tries again
    assert f"slot {slot} of the board is still another agent's" in fail.text
    served.agent.lost.add("peer")
    served.ask(TWO, Kind.HELLO, Kind.WELCOME, peer="other", body=body)
    assert list(served.server._connections) == [TWO]


def test_a_slot_of_the_board_whose_agent_left_is_free(served: Served) -> None:
    body = served.hello(served.board.take_slot())
    served.ask(ONE, Kind.HELLO, Kind.WELCOME, body=body)
    served.leave(ONE)
    served.ask(TWO, Kind.HELLO, Kind.WELCOME, peer="other", body=body)


# Copies that do not end.


def test_a_server_whose_copies_do_not_end_is_left_with_its_pages(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served.enter(ONE)
    ended = threading.Event()
    copies = served.server._connections[ONE].staging.copies
    monkeypatch.setattr(copies, "drain", lambda: ended.wait(GUARD_S))
    monkeypatch.setattr(server, "_CLOSE_S", 0.05)
    assert not served.server.close()
    assert "did not end within" in caplog.text
    monkeypatch.setattr(server, "_CLOSE_S", GUARD_S)
    assert not served.server.close()  # of the next region, which does not wait anew
    assert [one.owner is served.page for one in served.server._kept] == [True]
    ended.set()
    eventually(served.server.close, "the server does not end")
    assert served.server._kept == []


def test_an_export_whose_server_does_not_end_gives_nothing_back() -> None:
    given_back: list[str] = []
    for has_ended, expected in ((True, ["pages"]), (False, [])):
        given_back.clear()
        undo = ExitStack()
        undo.callback(given_back.append, "pages")
        stand_in: Any = SimpleNamespace(close=lambda has_ended=has_ended: has_ended)
        NixlTransport()._withdraw(stand_in, undo)
        assert given_back == expected
    assert ABANDONED.pop() == (stand_in, undo)


def test_pages_of_copies_that_did_not_end_are_kept(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise TransferTimeout("the kernels of a transfer did not end")

    served.enter(ONE)
    served.ask(ONE, Kind.BEGIN, Kind.GO, number=1)
    staging = served.server._connections[ONE].staging
    with monkeypatch.context() as patch:
        patch.setattr(staging.copies, "close", fail)
        served.leave(ONE)
        eventually(lambda: served.board.has_parted(0), "it is not left")
    assert served.server.close()
    kept: Any = ABANDONED.pop()
    assert kept[0] is staging
    assert [one.owner is served.page for one in kept[1]] == [True]
    assert "its slots and pages are kept" in caplog.text
    staging.close()
