"""ZeroMQ sockets with every bound set, and the context that the clients of a process share."""

import os
import threading
from collections.abc import Mapping, Sequence

import zmq

from kvxfer.control.framing import MAX_MESSAGE_BYTES
from kvxfer.control.key import SharedKey
from kvxfer.errors import NotAvailable

# Older releases have heap overflows in their decoders (CVE-2019-6250, CVE-2019-13132).
MIN_LIBZMQ = (4, 3, 2)
MAX_PARTS = 8

_OPTIONS = {
    zmq.LINGER: 0,
    zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
    zmq.SNDHWM: 16,
    zmq.RCVHWM: 16,
    zmq.HANDSHAKE_IVL: 5_000,
    # No heartbeats of libzmq: where a queue is full and its peer has gone, one of them, sent or
    # received, aborts the process (zeromq/libzmq issues 3937, 4364). The kernel finds dead hosts.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: 5,
    zmq.TCP_MAXRT: 5_000,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1_000,
}
_SERVER_OPTIONS = {
    # A client has one call on its way, seldom two; a flood of 16 MiB requests is cut short here.
    zmq.RCVHWM: 4,
    # An answer that cannot be delivered is an error to count, not a silence.
    zmq.ROUTER_MANDATORY: 1,
}
_CLIENT_OPTIONS = {
    # Queue nothing for a peer that is not there: a call is sent on a live connection or not.
    zmq.IMMEDIATE: 1,
}

# Plain ints: combining the flags of `zmq` costs more than sending.
_NOBLOCK = int(zmq.NOBLOCK)
_SNDMORE = int(zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


def require_libzmq(version: tuple[int, ...] | None = None) -> None:
    """Refuse a libzmq with known holes.

    Raises:
        NotAvailable: the version is below `MIN_LIBZMQ`.
    """
    found = zmq.zmq_version_info() if version is None else version
    if tuple(found) < MIN_LIBZMQ:
        raise NotAvailable(
            f"libzmq {'.'.join(map(str, found))} has known overflows, the lowest accepted is "
            f"{'.'.join(map(str, MIN_LIBZMQ))}; upgrade pyzmq"
        )


def open_server(context: Context, *, ipv6: bool, key: SharedKey | None) -> Socket:
    """A ROUTER with the limits of PROTOCOL.md, not bound; with a key only holders get in."""
    socket = _open(context, zmq.ROUTER, _OPTIONS | _SERVER_OPTIONS, ipv6=ipv6)
    if key is not None:
        key.guard(socket)
    return socket


def open_client(context: Context, *, ipv6: bool, key: SharedKey | None = None) -> Socket:
    """A DEALER with the limits of PROTOCOL.md, not connected."""
    socket = _open(context, zmq.DEALER, _OPTIONS | _CLIENT_OPTIONS, ipv6=ipv6)
    if key is not None:
        key.present(socket)
    return socket


def _open(
    context: Context, kind: int, options: Mapping[zmq.SocketOption, int], *, ipv6: bool
) -> Socket:
    socket = context.socket(kind)
    for option, value in options.items():
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.IPV6, int(ipv6))
    return socket


def send_parts(socket: Socket, parts: Sequence[bytes]) -> None:
    """Send one message, all of it or nothing.

    Raises:
        zmq.Again: there is no room for it.
    """
    for part in parts[:-1]:
        socket.send(part, _NOBLOCK | _SNDMORE)
    socket.send(parts[-1], _NOBLOCK)


def has_message(socket: Socket) -> bool:
    """Whether a message waits; to ask costs a fraction of being told by an exception."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


def receive_parts(socket: Socket) -> list[bytes] | None:
    """One waiting message, or None where it has over `MAX_PARTS` parts (all are consumed).

    Raises:
        zmq.Again: no message waits.
    """
    return receive_routed(socket)[1]


def receive_routed(socket: Socket) -> tuple[zmq.Frame, list[bytes] | None]:
    """As `receive_parts`, with the first frame itself: on a ROUTER it knows its connection.

    Raises:
        zmq.Again: no message waits.
    """
    # Frames say whether more follow; asking the socket after each part takes twice as long.
    first = frame = socket.recv(_NOBLOCK, copy=False)
    parts = [frame.bytes]
    num_parts = 1
    while frame.more:
        frame = socket.recv(_NOBLOCK, copy=False)
        num_parts += 1
        if num_parts <= MAX_PARTS:
            parts.append(frame.bytes)
    return first, parts if num_parts <= MAX_PARTS else None


class _SharedContext:
    """One context, so two threads, for all clients; it ends with the last of them."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start anew; in a forked child the old context belongs to the parent."""
        self._lock = threading.Lock()
        self._context: Context | None = None
        self._num_users = 0

    def acquire(self) -> Context:
        """The context, one user more."""
        with self._lock:
            if self._context is None:
                self._context = zmq.Context()
            self._num_users += 1
            return self._context

    def release(self, context: Context) -> None:
        """One user less; its sockets must be closed."""
        with self._lock:
            if context is not self._context:
                return
            self._num_users -= 1
            if self._num_users > 0:
                return
            self._context = None
        context.term()


client_context = _SharedContext()
os.register_at_fork(after_in_child=client_context.forget)
