"""The init port: senders ask here who this side is, LMCache's own as well as those with kvxfer."""

from collections.abc import Callable
from typing import Protocol

from kvxfer.connectors.lmcache.ports import PortServer
from kvxfer.connectors.lmcache.wire import (
    Hello,
    NixlInitRequest,
    NixlInitResponse,
    decode,
    encode,
)
from kvxfer.errors import ProtocolMismatch


class Stock(Protocol):
    """What LMCache's own channel answers."""

    def answer(self, message: bytes) -> bytes:
        """The answer to any message of LMCache's own."""


class InitPort(PortServer):
    """Answers senders with kvxfer itself, and all else as LMCache's channel would."""

    def __init__(
        self, host_and_port: str, met: Callable[[Hello], Hello], stock: Callable[[], Stock]
    ) -> None:
        """Bind ``host:port``.

        Args:
            host_and_port: where.
            met: notes who asked, and says who this side is.
            stock: LMCache's own channel, made when it is first needed.

        Raises:
            NotAvailable: the port cannot be bound.
        """
        super().__init__(host_and_port, "kvxfer-lmcache-init")
        self._met, self._stock = met, stock

    def answer(self, sender: str, message: bytes, reply: Callable[[bytes], None]) -> None:
        """Answer one message; one that nobody understands gets no answer."""
        hello = _hello_in(message)
        if hello is None:
            reply(self._stock().answer(message))
            return
        own = self._met(hello)
        reply(encode(NixlInitResponse(remote_agent_name=b"", remote_meta_bytes=b"", kvxfer=own)))


def _hello_in(message: bytes) -> Hello | None:
    try:
        return decode(message, NixlInitRequest).kvxfer
    except ProtocolMismatch:
        return None
