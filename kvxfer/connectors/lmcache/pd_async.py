"""LMCache's PD back end ``pd_backend_mode: async`` on kvxfer's channel.

What LMCache does stays LMCache's: allocation, gathering, tracking of batches, notices. Replaced are
the parts that a channel cannot cure: who is asked for pages and how long, when a key is a hit, and
how all of it ends.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq
from lmcache.v1.storage_backend.pd_backend_async import PDBackendAsync

from kvxfer.connectors.lmcache.outgoing import Batch, mark_failed
from kvxfer.connectors.lmcache.pd_common import NOTICE_LINGER_MS, PDHooks, PDParts
from kvxfer.connectors.lmcache.wire import AllocResponse

_MAX_OPEN_CALLS = 64


class KvxferPDBackendAsync(PDHooks, PDBackendAsync):  # type: ignore[misc]
    """Sends prefilled KV, or receives it; LMCache's engine makes it in place of its own."""

    def __init__(self, config: Any, metadata: Any) -> None:
        """Called by LMCache.

        Raises:
            InvalidUsage: wrong settings.
            NotAvailable: a port is taken, or no transport works here.
        """
        self._parts = PDParts(self, config, metadata)
        self._is_closed = False
        self._aborted: set[str] = set()
        self._callers = ThreadPoolExecutor(_MAX_OPEN_CALLS, "kvxfer-lmcache-alloc")
        with self._parts.constructing():
            super().__init__(config, metadata)

    # A sender.

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        memory_objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        """Send one batch of a request; one that names no receiver stays here.

        Raises:
            KvxferError: the receiver cannot be met, or the request does not fit it.
        """
        if not self._parts.may_send(transfer_spec):
            return
        self._parts.in_flight.begin()
        try:
            super().batched_submit_put_task(
                keys, memory_objs, Batch(transfer_spec), on_complete_callback
            )
        except Exception:
            self._parts.in_flight.end()
            mark_failed(transfer_spec)
            raise

    async def _async_remote_allocate(self, receiver_id: str, alloc_request: Any) -> AllocResponse:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._callers, self._parts.allocate, receiver_id, alloc_request
        )

    async def _async_transfer_task(self, *args: Any, **kwargs: Any) -> None:
        batch: Batch = kwargs["transfer_spec"]
        try:
            await super()._async_transfer_task(*args, **kwargs)
        finally:
            self._parts.in_flight.end()
            if batch.req_id in self._aborted:
                self._aborted.discard(batch.req_id)
                mark_failed(batch.request)

    async def _abort_request(self, req_id: str) -> None:
        self._aborted.add(req_id)
        await super()._abort_request(req_id)

    # A receiver.

    def _init_receiver(self) -> None:
        self._parts.serve(self.pd_config.peer_host, self.pd_config.peer_alloc_port)

    def close(self) -> None:
        """End everything within seconds; may be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        self.running = False
        self._parts.close()
        if self.pd_config.role == "sender":
            self._notify_staging_freed()
            self._async_proxy_socket.setsockopt(zmq.LINGER, NOTICE_LINGER_MS)
            self._end(self._sender_loop, self._sender_thread)
            self._async_proxy_socket.close()
            self._async_zmq_context.term()
        else:
            self._end(self._recv_loop, self._recv_thread)
        self._callers.shutdown(wait=False, cancel_futures=True)
        self.transfer_channel.close()

    def _end(self, loop: Any, thread: Any) -> None:
        self._shutdown_loop(loop, thread, timeout=self.pd_config.shutdown_timeout_sec)
