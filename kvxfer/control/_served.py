"""The server's side of one channel: a ROUTER socket, its handlers, and what it turned away."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from kvxfer import errors
from kvxfer.control import _sockets
from kvxfer.control.addresses import Resolved
from kvxfer.control.messages import (
    MAX_ERROR_CHARS,
    ErrorReply,
    decode,
    decoder_of,
    encode,
    is_ours,
)
from kvxfer.errors import KvxferError, NotAvailable, ProtocolMismatch

# The parameter is Any because a handler takes its own message type, not every Struct.
Handlers = Mapping[type[msgspec.Struct], Callable[[Any], msgspec.Struct]]

_log = logging.getLogger(__name__)
_MAX_CALL_ID_BYTES = 32
_BATCH = 64  # messages of one channel before the others, and the stop, get their turn


class ServedChannel:
    """One ROUTER socket, the handlers behind it, and what it turned away."""

    def __init__(self, name: str, handlers: Handlers) -> None:
        self.name = name
        self.handlers = dict(handlers)
        self.types = tuple(self.handlers)
        decoder_of(self.types)
        self.dropped = 0
        self.refused = 0

    def open(self, context: _sockets.Context, at: Resolved) -> int:
        """Bind and return the port."""
        self.socket = _sockets.open_socket(context, zmq.ROUTER, ipv6=at.is_ipv6)
        try:
            self.socket.bind(at.url)
        except zmq.ZMQError as error:
            self.socket.close()
            if error.errno == zmq.EADDRINUSE:
                raise NotAvailable(
                    f"port {at.port} in use by channel {self.name} cannot be bound: another socket "
                    f"listens on {at.url}; give {self.name} another port, or 0 for a free one",
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
            try:
                parts = _sockets.receive_parts(self.socket)
            except zmq.Again:
                return
            reply = self._answer(parts)
            if parts is None or reply is None:
                self._count_dropped()
                continue
            # A caller that does not read loses its answer; the others must not wait for it.
            with contextlib.suppress(zmq.Again):
                self.socket.send_multipart([*parts[:2], *reply], zmq.NOBLOCK)

    def _answer(self, parts: list[bytes] | None) -> list[bytes] | None:
        if parts is None or len(parts) < 3 or not is_ours(parts[2]):
            return None
        if not 1 <= len(parts[1]) <= _MAX_CALL_ID_BYTES:
            return None
        try:
            message = decode(parts[2:], self.types)
        except ProtocolMismatch as error:
            self.refused += 1
            return encode(_error_reply(error))
        return self._handle(message)

    def _handle(self, message: msgspec.Struct) -> list[bytes]:
        name = type(message).__name__
        try:
            reply = self.handlers[type(message)](message)
            if not isinstance(reply, msgspec.Struct):
                raise TypeError(f"the handler of {name} returned {reply!r}, not a message")
            return encode(reply)
        except KvxferError as error:
            return encode(_error_reply(error))
        except Exception as error:
            _log.exception("channel %s: the handler of %s failed", self.name, name)
            text = f"internal error of the server at {name} ({type(error).__name__}); see its log"
            return encode(ErrorReply("KvxferError", text))

    def _count_dropped(self) -> None:
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # powers of two: a flood cannot fill the log
            _log.warning("channel %s: %d foreign messages dropped so far", self.name, self.dropped)


def _error_reply(error: KvxferError) -> ErrorReply:
    kind = type(error)
    # The peer can only raise what it knows: a subclass from elsewhere travels as its nearest base.
    name = next(base.__name__ for base in kind.__mro__ if vars(errors).get(base.__name__) is base)
    code = error.code if -(1 << 31) <= error.code < 1 << 31 else 0
    # A lone surrogate, as in some file names, has no UTF-8.
    text = str(error).encode("utf-8", "replace").decode("utf-8")
    return ErrorReply(name, text[:MAX_ERROR_CHARS], code)
