"""The server's side of one channel: a ROUTER socket, its handlers, and what it turned away."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import zmq

from kvxfer.control import _sockets
from kvxfer.control._callers import Callers, Gone
from kvxfer.control._pending import Owed, Pending
from kvxfer.control.addresses import Resolved
from kvxfer.control.deferred import DeferredReply, Frames
from kvxfer.control.framing import decode_request, decoder_of, encode, is_ours
from kvxfer.control.key import SharedKey
from kvxfer.control.messages import ErrorReply
from kvxfer.control.replies import error_frames
from kvxfer.errors import KvxferError, NotAvailable, ProtocolMismatch

# The parameter is Any because a handler takes its own message type, not every Struct.
Handlers = Mapping[type[msgspec.Struct], Callable[[Any], msgspec.Struct | DeferredReply]]
OnGone = Callable[[str, str], object]
# Called from any thread with what the server's thread shall do next.
Post = Callable[[Callable[[], None]], None]

_log = logging.getLogger(__name__)
_MAX_CALL_ID_BYTES = 32
_BATCH = 64  # messages of one channel before the others, and the stop, get their turn


class ServedChannel:
    """One ROUTER socket, the handlers behind it, and what it turned away.

    Clients get their turns one message each: libzmq reads the connections in rotation.
    """

    def __init__(
        self, name: str, handlers: Handlers, *, post: Post, on_gone: OnGone | None
    ) -> None:
        self.name = name
        self.handlers = dict(handlers)
        self.types = tuple(self.handlers)
        decoder_of(self.types)
        self.dropped = 0
        self.refused = 0
        self.undelivered = 0
        self._post = post
        self._on_gone = on_gone
        self.pending = Pending()

    def open(
        self, context: _sockets.Context, places: Sequence[Resolved], key: SharedKey | None
    ) -> list[int]:
        """Bind to each of ``places``, which are of one family; returns the ports."""
        self.socket = _sockets.open_server(context, ipv6=places[0].is_ipv6, key=key)
        self.callers = Callers(context, self.socket)
        return [self._bind(at) for at in places]

    def _bind(self, at: Resolved) -> int:
        try:
            self.socket.bind(at.url)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise NotAvailable(
                    f"port {at.port} for channel {self.name} is in use: another socket listens on "
                    f"{at.url}; give {self.name} another port, or 0 for a free one",
                    code=error.errno,
                ) from error
            raise NotAvailable(
                f"channel {self.name} cannot listen on {at.url}: {error}; "
                f"bind an address of this host and a port that this user may take",
                code=error.errno or 0,
            ) from error
        endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(endpoint.rpartition(":")[2])

    def serve_waiting(self) -> None:
        """Answer what waits, up to a bound."""
        for _ in range(_BATCH):
            if not _sockets.has_message(self.socket):
                return
            frame, parts = _sockets.receive_routed(self.socket)
            if parts is None or not _is_request(parts):
                self._count_dropped()
            else:
                self._serve(frame, parts)

    @property
    def next_due_s(self) -> float:
        """When `keep_time` has something to do; infinity for never."""
        return min(self.pending.next_end_s, self.callers.next_probe_s)

    def keep_time(self, now_s: float) -> None:
        """Give up the answers that are too late, and those of callers that are gone."""
        for owed in self.pending.take_late(now_s):
            owed.deferred.abandon()
        for gone in self.callers.take_gone(now_s):
            self._say_gone(gone)

    def abandon_all(self) -> None:
        """The server closes."""
        for owed in self.pending.take_all():
            owed.deferred.abandon()

    def _serve(self, frame: zmq.Frame, parts: list[bytes]) -> None:
        routing_id, call_id = parts[:2]
        try:
            message, limit_s = decode_request(parts[2:], self.types)
        except ProtocolMismatch as error:
            self.refused += 1
            self._send(routing_id, call_id, error_frames(error))
            return
        self.callers.heard(frame, routing_id, getattr(message, "incarnation", ""))
        answer = self._handle(message)
        if isinstance(answer, DeferredReply):
            self._owe(Owed(routing_id, call_id, answer, time.monotonic() + limit_s))
        else:
            self._send(routing_id, call_id, answer)

    def _handle(self, message: msgspec.Struct) -> Frames | DeferredReply:
        name = type(message).__name__
        try:
            reply = self.handlers[type(message)](message)
            if isinstance(reply, DeferredReply):
                return reply
            if not isinstance(reply, msgspec.Struct):
                raise TypeError(f"the handler of {name} returned {reply!r}, not a message")
            return encode(reply)
        except KvxferError as error:
            return error_frames(error)
        except Exception as error:
            _log.exception("channel %s: the handler of %s failed", self.name, name)
            text = f"internal error of the server at {name} ({type(error).__name__}); see its log"
            return encode(ErrorReply("KvxferError", text))

    def _owe(self, owed: Owed) -> None:
        try:
            ticket = self.pending.add(owed)
        except NotAvailable as error:
            self._send(owed.routing_id, owed.call_id, error_frames(error))
            owed.deferred.abandon()
            return
        owed.deferred.attach(lambda frames: self._post(lambda: self._answer_late(ticket, frames)))

    def _answer_late(self, ticket: int, frames: Frames) -> None:
        owed = self.pending.take(ticket)
        if owed is not None and not self._send(owed.routing_id, owed.call_id, frames):
            owed.deferred.abandon()

    def _send(self, routing_id: bytes, call_id: bytes, frames: Frames) -> bool:
        parts = [routing_id, call_id, *frames]
        try:
            try:
                _sockets.send_parts(self.socket, parts)
            except zmq.Again:
                # libzmq looks up to 1 ms late at what its own thread has sent on; this looks now.
                self.socket.getsockopt(zmq.EVENTS)
                _sockets.send_parts(self.socket, parts)
        except zmq.Again:
            # A caller that does not read loses its answer; the others must not wait for it.
            self.undelivered += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.undelivered += 1
            self._say_gone(self.callers.forget(routing_id))
            return False
        return True

    def _say_gone(self, gone: Gone) -> None:
        for owed in self.pending.take_of(gone.routing_id):
            owed.deferred.abandon()
        if self._on_gone is None:
            return
        for name in gone.names:
            try:
                self._on_gone(self.name, name)
            except Exception:
                _log.exception("channel %s: what follows on the end of %s failed", self.name, name)

    def _count_dropped(self) -> None:
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # powers of two: a flood cannot fill the log
            _log.warning("channel %s: %d foreign messages dropped so far", self.name, self.dropped)


def _is_request(parts: list[bytes]) -> bool:
    return len(parts) >= 3 and 1 <= len(parts[1]) <= _MAX_CALL_ID_BYTES and is_ours(parts[2])
