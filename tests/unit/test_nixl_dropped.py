"""A link of `nixl` that is dropped unclosed; a stand-in for the agent."""

import logging
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from kvxfer.transport.nixl import wire
from kvxfer.transport.nixl.conversation import Far
from kvxfer.transport.nixl.link import NixlLink
from kvxfer.transport.nixl.memory import Range
from kvxfer.transport.nixl.reach import Reach
from kvxfer.transport.nixl.slots import ABANDONED
from kvxfer.transport.nixl.waiting import Mailbox
from kvxfer.transport.nixl.wire import Kind, Message
from kvxfer.transport.process import ProcessSpec
from kvxfer.tuning import NO_SECTION

WELCOME = wire.Welcome(4096, 1 << 20, 1, -1, 0, b"metadata")


class StandIn:
    """An agent whose peer lets everybody in; it notes what it is asked."""

    backend, is_inherited = "UCX", False

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._box = Mailbox()

    def open_box(self, connection: bytes) -> Mailbox:
        return self._box

    def send(self, name: str, message: Message) -> None:
        self.asked.append(f"send {message.kind.name}")
        if message.kind is Kind.HELLO:
            body = msgspec.msgpack.encode(WELCOME)
            self._box.put(name, message._replace(kind=Kind.WELCOME, body=body))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self.asked.append(name)


def link_of(agent: Any, given_back: list[str]) -> NixlLink:
    undo = ExitStack()
    undo.callback(given_back.append, "pages")
    far = Far("peer", 1234, (Range(4096, 4096),), in_place=True, watch=None)
    process = ProcessSpec.own()
    return NixlLink(
        agent,
        far,
        lambda: wire.Hello(wire.VERSION, bytes(16), 0, process, "", False, b"metadata"),
        (),
        Reach(False, ""),
        device=-1,
        num_threads=1,
        section=NO_SECTION,
        stall_s=20.0,
        connect_s=20.0,
        undo=undo,
    )


def test_a_link_that_is_dropped_keeps_all_and_asks_for_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent, given_back = StandIn(), list[str]()
    link = link_of(agent, given_back)
    agent.asked.clear()
    del link
    assert agent.asked == []  # whatever is asked may have to wait for another thread
    assert given_back == []
    assert "link to process 1234 was dropped unclosed" in caplog.text
    moving, rows, undo = ABANDONED.pop()  # type: ignore[misc]
    assert moving is None
    assert rows.close()
    undo.close()
    assert given_back == ["pages"]


def test_a_link_that_was_closed_is_dropped_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    agent, given_back = StandIn(), list[str]()
    link = link_of(agent, given_back)
    link.close()
    assert given_back == ["pages"]
    with caplog.at_level(logging.DEBUG):
        del link
    assert caplog.text == ""
