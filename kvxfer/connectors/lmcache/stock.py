"""LMCache's own channel, for peers without kvxfer.

It is made when such a peer is first met, or when a sender needs the metadata that make a legal
first message. It has a ZeroMQ context of its own, so that its waits end and its close ends no
socket of anybody else.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvxfer.closing import Closing
from kvxfer.errors import ControlTimeout, NotAvailable


class StockChannel(Closing):
    """LMCache's NIXL channel, made on first use. A context manager."""

    def __init__(self, make: Callable[[], Any], *, is_async: bool, timeout_s: float) -> None:
        """The channel that ``make`` returns; its handshakes take ``timeout_s`` at most."""
        self._make, self._is_async, self._timeout_s = make, is_async, timeout_s
        self._made: Any = None
        self._lock = threading.Lock()

    @property
    def channel(self) -> Any:
        """The channel.

        Raises:
            NotAvailable: NIXL is not installed.
        """
        with self._lock:
            if self._made is None:
                try:
                    self._made = self._make()
                except (ImportError, RuntimeError) as error:
                    raise NotAvailable(
                        f"LMCache's own channel cannot be made ({error}); install nixl, or set "
                        'kvxfer.peers to "kvxfer" in extra_config where every peer has kvxfer'
                    ) from error
                self._made.zmq_context = self._own_context()
            return self._made

    @property
    def is_made(self) -> bool:
        """Whether it was needed so far."""
        return self._made is not None

    def metadata(self) -> bytes:
        """What a sender's first message must carry, or a peer without kvxfer goes deaf."""
        return bytes(self.channel.nixl_agent.get_agent_metadata())

    def answer(self, message: bytes) -> bytes:
        """What LMCache's channel answers on its init port; raises whatever it raises."""
        from lmcache.v1.transfer_channel.nixl_channel import NixlMsg
        from lmcache.v1.transfer_channel.transfer_utils import SideMsg

        request = msgspec.msgpack.decode(message, type=NixlMsg | SideMsg)
        return msgspec.msgpack.encode(self.channel._handle_init_msg(request))

    def meet(self, local_id: str, peer_id: str, url: str, side: Any) -> Any:
        """LMCache's own handshake with the peer at ``url``, from any thread but its loop's.

        Raises:
            ControlTimeout: no answer in time.
        """
        arguments = (local_id, peer_id, url, side)
        try:
            if not self._is_async:
                return self.channel.lazy_init_peer_connection(*arguments)
            return asyncio.run(self._meet(*arguments))
        except (zmq.Again, TimeoutError, asyncio.TimeoutError) as error:
            raise ControlTimeout(
                f"{url} did not finish LMCache's handshake within {self._timeout_s} s"
            ) from error

    async def _meet(self, *arguments: Any) -> Any:
        handshake = self.channel.async_lazy_init_peer_connection(*arguments)
        return await asyncio.wait_for(handshake, self._timeout_s)

    def close(self) -> None:
        """Close what was made; may be called more than once."""
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.zmq_context.destroy(linger=0)
            made.close()

    def _own_context(self) -> Any:
        context = zmq.asyncio.Context() if self._is_async else zmq.Context()
        milliseconds = int(self._timeout_s * 1000)
        context.setsockopt(zmq.RCVTIMEO, milliseconds)
        context.setsockopt(zmq.SNDTIMEO, milliseconds)
        context.setsockopt(zmq.LINGER, 0)
        return context
