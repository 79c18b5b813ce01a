"""A sender's first words to a receiver: one legal message on its init port, and what it answers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from kvxfer.connectors.lmcache.wire import (
    MAX_MESSAGE_BYTES,
    Hello,
    NixlInitRequest,
    NixlInitResponse,
    decode,
    encode,
)
from kvxfer.errors import ControlTimeout


class Caller:
    """One REQ socket to one port, for a few calls."""

    def __init__(self, socket: "zmq.Socket[bytes]", url: str, timeout_s: float) -> None:
        self._socket, self._url, self._timeout_s = socket, url, timeout_s

    def call(self, message: bytes) -> bytes:
        """The answer to ``message``.

        Raises:
            ControlTimeout: none within the limit; the socket is of no use any more.
        """
        self._socket.send(message)
        if not self._socket.poll(int(self._timeout_s * 1000)):
            raise ControlTimeout(
                f"nobody answered at {self._url} within {self._timeout_s} s; start the receiver, "
                "or check pd_peer_host and the ports of the request's disagg_spec"
            )
        return self._socket.recv()


@contextmanager
def calling(host_and_port: str, timeout_s: float) -> Iterator[Caller]:
    """A connection to ``host:port`` that ends with the block, whatever became of it."""
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.connect(f"tcp://{host_and_port}")
        yield Caller(socket, host_and_port, timeout_s)


def greet(
    host_and_port: str, own: Hello, metadata: Callable[[], bytes], timeout_s: float
) -> Hello | None:
    """Who answers at ``host:port``; None where that is an LMCache without kvxfer.

    Args:
        host_and_port: an init port.
        own: who asks.
        metadata: of a NIXL agent of this side: to a peer without kvxfer a message without it is
            the last that its port takes.
        timeout_s: limit for the answer.

    Raises:
        ControlTimeout: no answer.
        ProtocolMismatch: an answer that is none of the protocol.
    """
    request = NixlInitRequest(local_meta_bytes=metadata(), kvxfer=own)
    with calling(host_and_port, timeout_s) as caller:
        return decode(caller.call(encode(request)), NixlInitResponse).kvxfer


def ask_side(host_and_port: str, message: Any, kind: type, timeout_s: float) -> Any:
    """The answer of type ``kind`` to LMCache's side message, which P2P sends after a handshake.

    Raises:
        ControlTimeout: no answer.
    """
    with calling(host_and_port, timeout_s) as caller:
        answer = caller.call(msgspec.msgpack.encode(message))
    return msgspec.msgpack.decode(answer, type=kind)
