"""What the posting side says to the server of a peer, and hears from it."""

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from kvxfer import errors
from kvxfer.errors import KvxferError, PeerLost, ProtocolMismatch, TransferTimeout
from kvxfer.transport.nixl import wire
from kvxfer.transport.nixl.agent import Agent
from kvxfer.transport.nixl.memory import Range
from kvxfer.transport.nixl.waiting import Pause
from kvxfer.transport.nixl.wire import Kind, Message
from kvxfer.transport.process import ProcessWatch

_SLEEP_S = 1e-3
_LOOK_S = 0.05


class Far(NamedTuple):
    """The peer, as its metadata says.

    Attributes:
        name: of its agent.
        pid: its process.
        regions: of its cache.
        in_place: whether UCX moves rows from and to ``regions`` themselves.
        watch: its process, where that is one of this host.
    """

    name: str
    pid: int
    regions: tuple[Range, ...]
    in_place: bool
    watch: ProcessWatch | None

    @property
    def has_ended(self) -> bool:
        """Whether its process has, as far as that can be told from here."""
        return self.watch is not None and self.watch.has_ended

    def require_alive(self) -> None:
        """Check its process."""
        if self.watch is not None:
            self.watch.require_alive()


class Conversation:
    """Messages to and from the server of a peer, with a deadline on each answer.

    Attributes:
        is_refused: the peer has said that it copies no more of the transfer under way.
    """

    def __init__(self, agent: Agent, far: Far, stall_s: float) -> None:
        self._agent, self._far, self._stall_s = agent, far, stall_s
        self.key = secrets.token_bytes(wire.ID_BYTES)
        self._box = agent.open_box(self.key)
        self._has_parted = False
        self.is_refused = False

    def send(self, kind: Kind, number: int = 0, body: bytes = b"") -> None:
        """Send a message."""
        self._agent.send(self._far.name, Message(self.key, kind, number=number, body=body))

    def ask(self, kind: Kind, expect: Kind, number: int = 0, body: bytes = b"") -> Message:
        """Send a message and wait for its answer."""
        self.send(kind, number, body)
        return self.hear(expect, number)

    def hear(self, expect: Kind, number: int, stall_s: float | None = None) -> Message:
        """Wait for a message.

        Raises:
            TransferTimeout: it did not come in time.
            PeerLost: the peer is gone.
        """
        found: list[Message] = []

        def look() -> bool:
            message = self.take()
            if message is not None:
                self.require_due(message, expect, number)
                found.append(message)
            return bool(found)

        self.wait(look, stall_s)
        return found[0]

    def wait(self, look: Callable[[], bool], stall_s: float | None = None) -> None:
        """Let NIXL go on until ``look`` says True."""
        stall_s = self._stall_s if stall_s is None else stall_s
        now = time.monotonic()
        deadline, look_s = now + stall_s, now + _LOOK_S
        pause = Pause(_SLEEP_S)
        while not look():
            if not self._agent.pump():
                pause.wait()
            now = time.monotonic()
            if now >= look_s:
                look_s = now + _LOOK_S
                self._far.require_alive()
            if now >= deadline:
                raise TransferTimeout(
                    f"the transfer to process {self._far.pid} has not moved for {stall_s:.6f} s "
                    "and was given up; keep both sides' pages and connect again"
                )

    def take(self) -> Message | None:
        """The next message of the peer; None for none."""
        while (mail := self._box.take()) is not None:
            name, message = mail
            if name == self._far.name:
                return message
        return None

    def require_due(self, message: Message, expect: Kind, number: int) -> None:
        """Check what has come.

        Raises:
            KvxferError: the peer has refused, or ended.
            ProtocolMismatch: it is not what was expected.
        """
        if message.kind is Kind.PARTED:
            self._has_parted = self.is_refused = True
            raise PeerLost(
                f"process {self._far.pid} has closed the cache of this link; connect again once "
                "it serves another"
            )
        if message.kind is Kind.FAIL:
            self.is_refused = True
            fail = wire.read_body(message, wire.Fail)
            kind = getattr(errors, fail.error, None)
            if not (isinstance(kind, type) and issubclass(kind, KvxferError)):
                kind = errors.TransferFailed
            raise kind(fail.text)
        if message.kind is not expect or message.number != number:
            raise ProtocolMismatch(
                f"process {self._far.pid} said {message.kind.name} of transfer {message.number}; "
                f"{expect.name} of {number} was due"
            )

    def require_open(self) -> None:
        """Check what has come while nothing was expected."""
        self._far.require_alive()
        self._agent.pump()
        message = self.take()
        if message is not None:
            self.require_due(message, Kind.DONE, -1)

    def leave(self, *, is_over: bool) -> None:
        """Tell the peer, where there is one, and hear nothing any more.

        Not where NIXL still writes to its slots: it keeps them until this process ends.
        """
        self._agent.close_box(self.key)
        if self._far.has_ended or self._has_parted:
            self._agent.forget(self._far.name)
            return
        if is_over:
            with contextlib.suppress(PeerLost):
                self.send(Kind.LEAVE)
