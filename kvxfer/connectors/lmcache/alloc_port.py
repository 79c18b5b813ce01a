"""The alloc port of a receiver: senders reserve pages here, before they write them."""

from collections.abc import Callable

from kvxfer.connectors.lmcache.arrivals import Arrivals
from kvxfer.connectors.lmcache.ports import PortServer
from kvxfer.connectors.lmcache.wire import (
    AllocResponse,
    CancelNotif,
    decode_request,
    encode,
)
from kvxfer.errors import ProtocolMismatch

_WAITING_MS = 2
_IDLE_MS = 100


class AllocPort(PortServer):
    """Hands out the pages of one receiver, in the order in which they were asked for."""

    def __init__(self, host_and_port: str, arrivals: Arrivals) -> None:
        """Bind ``host:port`` and serve.

        Raises:
            NotAvailable: the port cannot be bound.
        """
        super().__init__(host_and_port, "kvxfer-lmcache-alloc")
        self._arrivals = arrivals
        self.start()

    def idle_ms(self) -> int:
        """Answer those who wait, as pages become free."""
        self._arrivals.serve_waiting()
        return _WAITING_MS if self._arrivals.has_waiting else _IDLE_MS

    def answer(self, sender: str, message: bytes, reply: Callable[[bytes], None]) -> None:
        """Answer one message; what is none of the protocol is told that it has no page."""
        try:
            request = decode_request(message)
        except ProtocolMismatch:
            reply(encode(AllocResponse(remote_indexes=[-1])))
            raise
        if isinstance(request, CancelNotif):
            self._arrivals.cancel(sender, request)
            reply(encode(AllocResponse(remote_indexes=[])))
            return
        self._arrivals.ask(sender, request, lambda answer: reply(encode(answer)))
