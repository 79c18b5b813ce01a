"""A server of control channels with one thread, and a client with one deadline a call."""

import contextlib
import itertools
import logging
import math
import os
import socket as system_socket
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec
import zmq

from kvxfer import errors
from kvxfer.closing import Closing
from kvxfer.control import _sockets
from kvxfer.control._served import Handlers, ServedChannel
from kvxfer.control.addresses import (
    Resolved,
    advertised_host,
    format_url,
    parse_url,
    resolve_host,
)
from kvxfer.control.messages import ErrorReply, decode, decoder_of, encode
from kvxfer.errors import ControlTimeout, InvalidUsage, KvxferError, ProtocolMismatch

__all__ = ["ControlClient", "ControlServer", "Handlers"]

_log = logging.getLogger(__name__)
_MAX_DEADLINE_S = 3600.0
_CLOSE_S = 1.5
_SLICE_S = 0.1  # how soon a call in progress notices that its client is being closed


class ControlServer(Closing):
    """Serves channels, each on its own TCP port, from one background thread.

    Handlers run on that thread one after another: they must be quick and must not call back into
    the server's own channels. A `KvxferError` that a handler raises is raised again at the caller.
    """

    def __init__(
        self,
        channels: Mapping[str, Handlers],
        *,
        bind_host: str = "127.0.0.1",
        ports: Mapping[str, int] | None = None,
        advertise_host: str | None = None,
    ) -> None:
        """Bind and start to serve.

        Args:
            channels: for each channel, the message types it takes and their handlers.
            bind_host: one address of this host, or a wildcard together with ``advertise_host``.
            ports: port of each channel; 0 or absent takes a free one.
            advertise_host: the host in `addresses`, where peers must dial another than is bound.

        Raises:
            InvalidUsage: no channel, unusable types or ports, equal ports, a wildcard host.
            NotAvailable: a port is in use, the host is not of this machine, libzmq is too old.
        """
        _sockets.require_libzmq()
        wanted = _checked_ports(channels, ports or {})
        ip = resolve_host(bind_host)
        host = advertised_host(ip, advertise_host)
        self._channels = [ServedChannel(name, handlers) for name, handlers in channels.items()]
        self._context: _sockets.Context = zmq.Context()
        self._addresses: dict[str, str] = {}
        try:
            for channel in self._channels:
                port = channel.open(self._context, Resolved(ip, wanted[channel.name]))
                self._addresses[channel.name] = format_url(host, port)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._pid = os.getpid()
        self._close_lock = threading.Lock()
        self._stop_reader, self._stop_writer = system_socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kvxfer-control", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> Mapping[str, str]:
        """For each channel the address that peers dial, such as ``tcp://127.0.0.1:4001``."""
        return MappingProxyType(self._addresses)

    @property
    def dropped(self) -> dict[str, int]:
        """For each channel the foreign messages that were dropped without an answer."""
        return {channel.name: channel.dropped for channel in self._channels}

    @property
    def refused(self) -> dict[str, int]:
        """For each channel the messages of another version or schema that were refused."""
        return {channel.name: channel.refused for channel in self._channels}

    def close(self) -> None:
        """Stop serving and free the ports; bounded, and may be called again, from any thread.

        An answer that is still on its way out may be lost, as with a server that dies.
        """
        if os.getpid() != self._pid:
            return  # a forked child: the thread and the sockets are the parent's
        with self._close_lock:
            if self._stop_writer.fileno() >= 0:
                # The thread may be gone already, its end of the pair with it.
                with contextlib.suppress(OSError):
                    self._stop_writer.send(b"x")
                self._stop_writer.close()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.error("a handler has not returned within %.1f s; its thread is left", _CLOSE_S)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stop_reader.fileno(), zmq.POLLIN)
        by_socket = {channel.socket: channel for channel in self._channels}
        for socket in by_socket:
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._stop_reader.fileno() in ready:
                    return
                for socket, channel in by_socket.items():
                    if socket in ready:
                        channel.serve_waiting()
        except Exception:
            _log.exception("the control thread ends; %s are served no more", self._addresses)
        finally:
            self._stop_reader.close()
            self._context.destroy(linger=0)


def _checked_ports(channels: Mapping[str, Handlers], ports: Mapping[str, int]) -> dict[str, int]:
    if not channels or not all(channels):
        raise InvalidUsage(f"channels are {list(channels)}; name at least one, none of them empty")
    taken: dict[int, str] = {}
    for name, port in ports.items():
        if name not in channels:
            raise InvalidUsage(f"port {port} is for channel {name!r}; known are {list(channels)}")
        if type(port) is not int or not 0 <= port <= 65535:
            raise InvalidUsage(f"port {port!r} of channel {name!r} is out of range; use 0 to 65535")
        if port and port in taken:
            raise InvalidUsage(
                f"channels {taken[port]!r} and {name!r} both have port {port}; give each its own"
            )
        taken[port] = name
    return {name: ports.get(name, 0) for name in channels}


_ReplyT = TypeVar("_ReplyT", bound=msgspec.Struct)


class ControlClient(Closing, Generic[_ReplyT]):
    """Calls one channel of one peer. Threads may share it; their calls run one after another."""

    def __init__(
        self,
        address: str,
        reply_types: type[_ReplyT] | tuple[type[_ReplyT], ...],
        *,
        deadline_s: float = 5.0,
    ) -> None:
        """Make a client; nothing is sent, and the peer need not be there yet.

        Args:
            address: ``tcp://host:port``. A host name is looked up here, once.
            reply_types: the message type, or a tuple of those, that answers are read as.
            deadline_s: seconds that a call may take, where it does not say otherwise.

        Raises:
            InvalidUsage: malformed address, unusable types, deadline out of range.
            NotAvailable: the host name has no address, or libzmq is too old.
        """
        _sockets.require_libzmq()
        self._at = parse_url(address)
        self.address = address
        self._deadline_s = _checked_deadline(deadline_s)
        kinds = reply_types if isinstance(reply_types, tuple) else (reply_types,)
        self._types: tuple[type[msgspec.Struct], ...] = (*kinds, ErrorReply)
        decoder_of(self._types)
        self._lock = threading.Lock()
        self._closing = False
        self._pid = os.getpid()
        self._nonce = os.urandom(8)
        self._counter = itertools.count(1)
        self._context = _sockets.client_context.acquire()
        try:
            self._socket = self._open()
        except BaseException:
            _sockets.client_context.release(self._context)
            raise

    def call(self, message: msgspec.Struct, *, deadline_s: float | None = None) -> _ReplyT:
        """Send a message, at most once, and wait for its answer.

        Args:
            message: what to send.
            deadline_s: seconds for all of it: the other threads' calls, connecting, sending and
                the answer.

        Returns:
            The answer, one of the reply types.

        Raises:
            ControlTimeout: the deadline passed. The server may have run the call all the same.
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
                raise self._timeout(name, limit_s, "no connection; nothing was sent")
            reply = self._receive(call_id, end_s, name)
        except KvxferError:
            raise
        except BaseException:
            # Ctrl-C may come between two parts of a message, and the next would be glued to them.
            self._socket.close(linger=0)
            self._socket = self._open()
            raise
        finally:
            self._lock.release()
        if reply is None:
            raise self._timeout(name, limit_s, "sent, not answered; its outcome is unknown")
        if isinstance(reply, ErrorReply):
            raise _error_of(reply, self.address)
        # decode() returns one of the reply types or ErrorReply, and that is excluded above.
        return reply  # type: ignore[return-value]

    def close(self) -> None:
        """Close at once, without waiting for the peer; a call in progress raises InvalidUsage."""
        self._closing = True
        if os.getpid() != self._pid:
            return  # a forked child: the socket is the parent's
        with self._lock:
            if not self._socket.closed:
                self._socket.close(linger=0)
                _sockets.client_context.release(self._context)

    def _open(self) -> _sockets.Socket:
        opened = _sockets.open_socket(self._context, zmq.DEALER, ipv6=self._at.is_ipv6)
        try:
            opened.connect(self._at.url)
        except BaseException:
            opened.close()
            raise
        return opened

    def _send(self, parts: list[bytes], end_s: float) -> bool:
        while self._wait(zmq.POLLOUT, end_s):
            # The connection may go between poll and send.
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(parts, zmq.NOBLOCK)
                return True
        return False

    def _receive(self, call_id: bytes, end_s: float, name: str) -> msgspec.Struct | None:
        while self._wait(zmq.POLLIN, end_s):
            try:
                parts = _sockets.receive_parts(self._socket)
            except zmq.Again:
                continue
            if parts is None or parts[0] != call_id:
                continue  # foreign, or the late answer to a call that timed out
            try:
                return decode(parts[1:], self._types)
            except ProtocolMismatch as error:
                raise ProtocolMismatch(f"answer of {self.address} to {name}: {error}") from error
        return None

    def _wait(self, event: int, end_s: float) -> bool:
        while True:
            if self._closing or os.getpid() != self._pid:
                raise InvalidUsage(
                    f"the client of {self.address} is closed or belongs to the process before a "
                    f"fork; make a new one"
                )
            left_s = end_s - time.monotonic()
            timeout_ms = math.ceil(max(0.0, min(left_s, _SLICE_S)) * 1000)
            if self._socket.poll(timeout_ms, event):
                return True
            if left_s <= 0:
                return False

    def _timeout(self, name: str, limit_s: float, state: str) -> ControlTimeout:
        return ControlTimeout(
            f"{name} to {self.address} is not done after {limit_s:g} s: {state}; "
            f"check that the peer lives, or raise deadline_s"
        )


def _error_of(reply: ErrorReply, address: str) -> KvxferError:
    kind = vars(errors).get(reply.kind)
    if isinstance(kind, type) and issubclass(kind, KvxferError):
        return kind(f"{address}: {reply.message}", reply.code)
    return KvxferError(f"{address}: {reply.kind}: {reply.message}", reply.code)


def _checked_deadline(deadline_s: float) -> float:
    # Written so that NaN fails too.
    if not 0 < deadline_s <= _MAX_DEADLINE_S:
        raise InvalidUsage(
            f"deadline_s is {deadline_s}; use a number above 0 and at most {_MAX_DEADLINE_S:g}"
        )
    return float(deadline_s)
