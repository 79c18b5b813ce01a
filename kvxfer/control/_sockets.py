"""ZeroMQ sockets with every bound set, and the context that the clients of a process share."""

import os
import threading

import zmq

from kvxfer.control.messages import MAX_MESSAGE_BYTES
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
    zmq.HEARTBEAT_IVL: 5_000,
    zmq.HEARTBEAT_TIMEOUT: 15_000,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1_000,
}

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


def open_socket(context: Context, kind: int, *, ipv6: bool) -> Socket:
    """A socket with the limits of PROTOCOL.md, not bound or connected."""
    socket = context.socket(kind)
    for option, value in _OPTIONS.items():
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.IPV6, int(ipv6))
    if kind == zmq.DEALER:
        # Queue nothing for a peer that is not there: a call is sent on a live connection or not.
        socket.setsockopt(zmq.IMMEDIATE, 1)
    return socket


def receive_parts(socket: Socket) -> list[bytes] | None:
    """One waiting message, or None where it has over `MAX_PARTS` parts (all are consumed).

    Raises:
        zmq.Again: no message waits.
    """
    parts = [socket.recv(zmq.NOBLOCK)]
    num_parts = 1
    while socket.getsockopt(zmq.RCVMORE):
        part = socket.recv(zmq.NOBLOCK)
        num_parts += 1
        if num_parts <= MAX_PARTS:
            parts.append(part)
    return parts if num_parts <= MAX_PARTS else None


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
