"""A client of one control channel, with one deadline a call."""

import contextlib
import itertools
import math
import os
import threading
import time
from typing import Generic, TypeVar

import msgspec
import zmq

from kvxfer.closing import Closing
from kvxfer.control import _sockets
from kvxfer.control._client_events import ClientEvents
from kvxfer.control.addresses import parse_url
from kvxfer.control.framing import MAX_LIMIT_MS, decode, decoder_of, encode, encode_limit
from kvxfer.control.key import SharedKey
from kvxfer.control.messages import ErrorReply
from kvxfer.control.replies import error_of
from kvxfer.errors import (
    ControlTimeout,
    InvalidUsage,
    KvxferError,
    NotAvailable,
    PeerLost,
    ProtocolMismatch,
)

__all__ = ["ControlClient"]

_MAX_DEADLINE_S = MAX_LIMIT_MS / 1000
_SLICE_S = 0.1  # how soon a call notices that its client is being closed or its connection gone
_RETURN_S = 5.0  # a peer that was there and has gone has this long to come back, of any deadline
_RETRY_S = 0.5  # of which every call waits a little for itself
_ReplyT = TypeVar("_ReplyT", bound=msgspec.Struct)


class ControlClient(Closing, Generic[_ReplyT]):
    """Calls one channel of one peer. Threads may share it; their calls run one after another."""

    def __init__(
        self,
        address: str,
        reply_types: type[_ReplyT] | tuple[type[_ReplyT], ...],
        *,
        deadline_s: float = 5.0,
        key: SharedKey | None = None,
    ) -> None:
        """Make a client; nothing is sent, and the peer need not be there yet.

        Args:
            address: ``tcp://host:port``. A host name is looked up here, once.
            reply_types: the message type, or a tuple of those, that answers are read as.
            deadline_s: seconds that a call may take, where it does not say otherwise.
            key: the key of the server, where it has one.

        Raises:
            InvalidUsage: malformed address, unusable types, deadline out of range.
            NotAvailable: the host name has no address, or libzmq is too old.
        """
        _sockets.require_libzmq()
        self._at = parse_url(address)
        self.address = address
        self._key = key
        self._deadline_s = _checked_deadline(deadline_s)
        kinds = reply_types if isinstance(reply_types, tuple) else (reply_types,)
        self._types: tuple[type[msgspec.Struct], ...] = (*kinds, ErrorReply)
        decoder_of(self._types)
        self._lock = threading.Lock()
        self._closing = False
        self._pid = os.getpid()
        self._nonce = os.urandom(8)
        self._counter = itertools.count(1)
        self._is_met = False  # over the connection there is
        self._lost_s = math.inf  # when the last one to a peer that was met has ended
        self._context = _sockets.client_context.acquire()
        try:
            self._open()
        except BaseException:
            _sockets.client_context.release(self._context)
            raise

    def call(self, message: msgspec.Struct, *, deadline_s: float | None = None) -> _ReplyT:
        """Send a message, at most once, and wait for its answer.

        Args:
            message: what to send.
            deadline_s: seconds for all of it: the other threads' calls, connecting, sending and
                the answer. The server is told what is left of it.

        Returns:
            The answer, one of the reply types.

        Raises:
            ControlTimeout: the deadline passed. The server may have run the call all the same.
            NotAvailable: the peer does not admit the key; nothing was sent. Of a client with quite
                another key, or with none, libzmq does not tell: that is a timeout.
            PeerLost: the connection ended before the answer came, and the server may have run it;
                or before the call, and in five seconds there was no other.
            ProtocolMismatch: the answer is of another version or breaks the schema.
            InvalidUsage: the client is closed or was made before a fork, or the message cannot
                be encoded.
            KvxferError: what the handler raised, as the same class of `kvxfer.errors`.
        """
        limit_s = self._deadline_s if deadline_s is None else _checked_deadline(deadline_s)
        end_s = time.monotonic() + limit_s
        name = type(message).__name__
        frames = encode(message)
        if not self._lock.acquire(timeout=limit_s):
            raise self._timeout(name, limit_s, "calls of other threads took all of it")
        try:
            call_id = self._nonce + next(self._counter).to_bytes(8, "big")
            if not self._send([call_id, *frames], end_s):
                raise self._unsent(name, limit_s)
            reply = self._receive(call_id, end_s, name)
        except KvxferError:
            raise
        except BaseException:
            # Ctrl-C may come between two parts of a message, and the next would be glued to them.
            self._shut()
            self._open()
            raise
        finally:
            self._lock.release()
        if reply is None:
            raise self._timeout(name, limit_s, "sent, not answered; its outcome is unknown")
        if isinstance(reply, ErrorReply):
            raise error_of(reply, self.address)
        # decode() returns one of the reply types or ErrorReply, and that is excluded above.
        return reply  # type: ignore[return-value]

    def close(self) -> None:
        """Close at once, without waiting for the peer; a call in progress raises InvalidUsage."""
        self._closing = True
        if os.getpid() != self._pid:
            return  # a forked child: the socket is the parent's
        with self._lock:
            if not self._socket.closed:
                self._shut()
                _sockets.client_context.release(self._context)

    def _open(self) -> None:
        self._socket = _sockets.open_client(self._context, ipv6=self._at.is_ipv6, key=self._key)
        self._events = ClientEvents(self._context, self._socket)
        self._readable, self._writable = zmq.Poller(), zmq.Poller()
        self._readable.register(self._socket, zmq.POLLIN)
        self._writable.register(self._socket, zmq.POLLOUT)
        try:
            self._socket.connect(self._at.url)
        except BaseException:
            self._shut()
            raise

    def _shut(self) -> None:
        self._events.close()
        self._socket.close(linger=0)

    def _send(self, parts: list[bytes], end_s: float) -> bool:
        self._require_usable()
        begin_s = time.monotonic()
        while True:
            # Without a look whether there is room: most often there is. But where a connection has
            # just ended, wait for the next, for libzmq might still take a message for the old one.
            if not self._drain():
                limit = encode_limit(end_s - time.monotonic())
                with contextlib.suppress(zmq.Again):
                    _sockets.send_parts(self._socket, [*parts, limit])
                    self._events.forget()
                    self._is_met, self._lost_s = True, math.inf
                    return True
            return_s = max(self._lost_s + _RETURN_S, begin_s + _RETRY_S)
            if self._events.is_final or time.monotonic() >= min(end_s, return_s):
                return False
            self._wait(self._writable, min(end_s, time.monotonic() + _SLICE_S))

    def _receive(self, call_id: bytes, end_s: float, name: str) -> msgspec.Struct | None:
        while True:
            ready = self._wait(self._readable, min(end_s, time.monotonic() + _SLICE_S))
            lost = not ready and self._drain()
            # The answer may have come just before the end of the connection.
            if not ready and not self._readable.poll(0):
                if lost:
                    raise PeerLost(
                        f"{self.address} ended the connection before it answered {name}, whose "
                        f"outcome is unknown; check that the peer lives, and connect again"
                    )
                if time.monotonic() >= end_s:
                    return None
                continue
            try:
                parts = _sockets.receive_parts(self._socket)
            except zmq.Again:
                continue
            if parts is None or parts[0] != call_id:
                continue  # foreign, a probe, or the late answer to a call that timed out
            try:
                return decode(parts[1:], self._types)
            except ProtocolMismatch as error:
                raise ProtocolMismatch(f"answer of {self.address} to {name}: {error}") from error

    def _drain(self) -> bool:
        """Whether a connection has ended since the last time.

        Where nobody was met over it, as at a tunnel whose far end is not there yet, nobody is lost.
        """
        has_ended = self._events.drain()
        if has_ended and self._is_met:
            self._is_met, self._lost_s = False, time.monotonic()
        return has_ended

    def _wait(self, poller: zmq.Poller, end_s: float) -> bool:
        while True:
            self._require_usable()
            left_s = end_s - time.monotonic()
            timeout_ms = math.ceil(max(0.0, min(left_s, _SLICE_S)) * 1000)
            if poller.poll(timeout_ms):
                return True
            if left_s <= 0:
                return False

    def _require_usable(self) -> None:
        if self._closing or os.getpid() != self._pid:
            raise InvalidUsage(
                f"the client of {self.address} is closed or belongs to the process before a "
                f"fork; make a new one"
            )

    def _unsent(self, name: str, limit_s: float) -> KvxferError:
        """Why there was no connection; the next call tries a new one."""
        refusal, is_final = self._events.refusal, self._events.is_final
        self._shut()  # libzmq may have given this one up, as after a foreign greeting
        self._open()
        if is_final:
            return NotAvailable(
                f"{name} to {self.address} was not sent: {refusal}; give both sides the same key"
            )
        if self._lost_s < math.inf:
            return PeerLost(
                f"{self.address} ended the connection, and there is no other; {name} was not sent; "
                f"check that the peer lives, and connect again"
            )
        why = f" ({refusal})" if refusal else ""
        return self._timeout(name, limit_s, f"no connection{why}; nothing was sent")

    def _timeout(self, name: str, limit_s: float, state: str) -> ControlTimeout:
        return ControlTimeout(
            f"{name} to {self.address} is not done after {limit_s:g} s: {state}; "
            f"check that the peer lives, or raise deadline_s"
        )


def _checked_deadline(deadline_s: float) -> float:
    # Written so that NaN fails too.
    if not 0 < deadline_s <= _MAX_DEADLINE_S:
        raise InvalidUsage(
            f"deadline_s is {deadline_s}; use a number above 0 and at most {_MAX_DEADLINE_S:g}"
        )
    return float(deadline_s)
