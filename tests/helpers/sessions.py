"""A sender and a receiver in this process, and the fixture that makes them."""

from collections.abc import Iterator
from typing import Any

import pytest
from peer_process import InThisProcess
from session_host import SessionHost
from session_sides import here, open_receiver, open_sender

from kvxfer.session import SendHandle

BLOCKS = [3, 1, 7]


class Session:
    """Both sides in this process, over loopback."""

    def __init__(self, receiver: dict[str, Any], sender: dict[str, Any]) -> None:
        self.far, self.near = here(), here()
        local = {"transport": "loopback", "memory": "private"}
        self.to = open_receiver(self.far, receiver.pop("cache", None), **local, **receiver)
        open_sender(self.near, sender.pop("cache", None), **local, **sender)

    @property
    def receiver(self) -> Any:
        return self.host(self.far).receiver

    @property
    def sender(self) -> Any:
        return self.host(self.near).sender

    @staticmethod
    def host(side: Any) -> SessionHost:
        assert isinstance(side, InThisProcess)
        host: SessionHost = side.host
        return host

    def send(self, name: str = "r-1", blocks: Any = BLOCKS, **args: Any) -> SendHandle:
        handle: SendHandle = self.sender.send(name, blocks, to=self.to, **args)
        return handle

    def notice(self) -> Any:
        return self.receiver.poll(20.0)

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    receiver, sender = getattr(request, "param", ({}, {}))
    made = Session(dict(receiver), dict(sender))
    try:
        yield made
    finally:
        made.close()


def signs_of_life(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The connections that the receiver hears from now on, again and again."""
    signs: list[str] = []
    silence = session.receiver._book._silence
    heard = silence.heard

    def note(connection: str) -> None:
        heard(connection)
        signs.append(connection)

    monkeypatch.setattr(silence, "heard", note)
    return signs


def with_args(receiver: dict[str, Any] | None = None, sender: dict[str, Any] | None = None) -> Any:
    return pytest.mark.parametrize("session", [(receiver or {}, sender or {})], indirect=True)
