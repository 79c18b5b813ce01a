"""The wire protocol of ZeroMQ by hand: for bytes that no socket of libzmq sends."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
READY = bytes([4, len(_READY)]) + _READY


@contextmanager
def raw_dealer(port: int, *, timeout_s: float) -> Iterator[socket.socket]:
    """A TCP connection to a ROUTER on this host whose handshake is complete.

    libzmq cuts a connection that sends frames before it has heard the other side's READY.
    """
    with socket.create_connection(("127.0.0.1", port), timeout_s) as raw:
        raw.sendall(GREETING + READY)
        heard = b""
        while b"ROUTER" not in heard:
            data = raw.recv(4096)
            if not data:
                raise ConnectionError(f"the handshake ended after {heard!r}")
            heard += data
        yield raw


def is_cut(raw: socket.socket) -> bool:
    """Whether the other side ends the connection; TimeoutError where it does not."""
    try:
        while raw.recv(4096):
            pass
    except ConnectionError:
        pass
    return True
