"""The far side of a sweep on another host: an agent that listens there, and the way to it."""

import logging
import uuid
from contextlib import ExitStack
from typing import Any

import msgspec

from kvxfer.closing import Closing
from kvxfer.control import ControlServer, SharedKey
from kvxfer.errors import ControlTimeout, KvxferError, NotAvailable, PeerLost
from kvxfer.sweep import messages
from kvxfer.sweep.agent import Agent, Handlers, RemoteAgent, serve_agent
from kvxfer.sweep.binding import Binding
from kvxfer.sweep.environment import environment

_log = logging.getLogger(__name__)
_MEET_S = 10.0
_LEAVE_S = 1.0
# A clean-up, often after something else has failed: nobody waits long for that.
_RELEASE_S = 3.0
_SILENT_S = 0.2  # nor for one that has just given no answer; it sees the end of the connection
# Of what a reader needs to judge a figure, what may differ between the two sides.
_OF_A_SIDE = ("system", "cpu", "cpus", "cuda", "driver", "gpus")


class FarAgent(Closing):
    """An agent that somebody started on another host. A context manager.

    Attributes:
        environment: what the far side says of itself, for a report.
    """

    def __init__(self, address: str, key: SharedKey | None) -> None:
        """Meet it.

        Raises:
            InvalidUsage: a malformed address.
            ControlTimeout: nobody answers there within ten seconds, or asks for another key.
            NotAvailable: it has another sweep, or is another version of kvxfer.
        """
        self._name = uuid.uuid4().hex
        self._is_silent = False
        self._agent = RemoteAgent(address, key=key)
        with ExitStack() as undo:
            undo.callback(self._agent.close)
            found = self._agent.call(messages.Meet(incarnation=self._name), deadline_s=_MEET_S)
            undo.callback(self._leave)
            theirs, own = found.environment.get("kvxfer"), environment()["kvxfer"]
            if theirs != own:
                raise NotAvailable(
                    f"{address} runs kvxfer {theirs}, this side {own}; install the same on both"
                )
            self._stack = undo.pop_all()
        self.environment = {
            f"peer {name}": found.environment[name]
            for name in _OF_A_SIDE
            if name in found.environment
        }

    def call(self, message: msgspec.Struct) -> Any:
        """Send a message to the agent and wait for its reply.

        Raises:
            PeerLost: the connection to it ended.
            ControlTimeout: no reply in time, which for a `Release` is three seconds at most.
            KvxferError: what the agent raised.
        """
        try:
            reply = self._agent.call(message, deadline_s=self._deadline_s(message))
        except (PeerLost, ControlTimeout, KeyboardInterrupt):
            self._is_silent = True
            raise
        self._is_silent = False
        return reply

    def close(self) -> None:
        """Let it go, which frees what was prepared; may be called more than once."""
        self._stack.close()

    def _deadline_s(self, message: msgspec.Struct) -> float | None:
        """None = as long as the agent's work may take."""
        if isinstance(message, messages.Release):
            return _SILENT_S if self._is_silent else _RELEASE_S
        return None

    def _leave(self) -> None:
        limit_s = _SILENT_S if self._is_silent else _LEAVE_S
        try:
            self._agent.call(messages.Leave(incarnation=self._name), deadline_s=limit_s)
        except KvxferError as error:  # it sees the end of the connection
            _log.info("leaving the far side: %s", error)


class Listener(Closing):
    """An agent that waits for sweeps from other hosts, one at a time. A context manager.

    Attributes:
        address: what the sweep takes as ``--peer``.
    """

    def __init__(self, port: int, binding: Binding) -> None:
        """Listen on ``port``; 0 takes a free one.

        Raises:
            InvalidUsage: unusable hosts, or a bind beyond loopback without a key.
            NotAvailable: the port is in use.
        """
        self._sweep = ""  # whose far side this is
        self._agent = Agent(binding)
        handlers: Handlers = {
            **self._agent.handlers,
            messages.Meet: self._meet,
            messages.Leave: lambda message: self._left(message.incarnation),
        }
        self._server: ControlServer = serve_agent(
            handlers, port=port, binding=binding, on_gone=lambda _, name: self._left(name)
        )
        self.address = self._server.addresses["sweep"]

    def close(self) -> None:
        """Stop listening and free everything; may be called more than once."""
        self._server.close()
        self._agent.close()

    def _meet(self, message: messages.Meet) -> messages.Met:
        if self._sweep not in ("", message.incarnation):
            raise NotAvailable("another sweep is under way with this peer; wait until it has ended")
        self._sweep = message.incarnation
        return messages.Met(environment=environment())

    def _left(self, name: str) -> messages.Ready:
        """It told so, or died and gave nothing back by itself."""
        if name == self._sweep:
            self._sweep = ""
            self._agent.close()
        return messages.Ready()
