"""Ctrl-C in a call on a control channel: the next call is a whole message and is answered."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvxfer.control import ControlClient, ControlServer

DEADLINE_S = 10.0


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    number: int


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    number: int


class Interrupted:
    """A client's socket in one of whose calls Ctrl-C arrives, once."""

    def __init__(self, socket: Any, when: str) -> None:
        self._socket = socket
        self._when = when

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def _interrupt(self, when: str) -> None:
        if when == self._when:
            self._when = ""
            raise KeyboardInterrupt

    def send(self, part: bytes, flags: int) -> None:
        self._interrupt("before sending")
        self._socket.send(part, flags)
        self._interrupt("between two parts sent" if flags & zmq.SNDMORE else "after sending")

    def recv(self, flags: int, copy: bool) -> zmq.Frame:
        part: zmq.Frame = self._socket.recv(flags, copy=copy)
        self._interrupt("between two parts received")
        return part


@pytest.fixture
def client() -> Iterator[ControlClient[Answer]]:
    handlers = {Ask: lambda message: Answer(message.number + 1)}
    with (
        ControlServer({"ask": handlers}) as server,
        ControlClient(server.addresses["ask"], Answer, deadline_s=DEADLINE_S) as made,
    ):
        yield made


@pytest.mark.parametrize(
    "when",
    ["before sending", "between two parts sent", "after sending", "between two parts received"],
)
def test_the_next_call_is_answered(client: ControlClient[Answer], when: str) -> None:
    assert client.call(Ask(0)) == Answer(1)
    client._socket = Interrupted(client._socket, when)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        client.call(Ask(10))
    assert [client.call(Ask(number)) for number in (20, 30)] == [Answer(21), Answer(31)]
