"""LMCache's PD back end ``pd_backend_mode: sync`` on kvxfer's channel; see `pd_async`."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
import zmq
from lmcache.v1.storage_backend.pd_backend import (
    CacheQueryRequest,
    CacheQueryResponse,
    PDBackend,
)

from kvxfer.connectors.lmcache.outgoing import Batch, mark_failed
from kvxfer.connectors.lmcache.pd_common import NOTICE_LINGER_MS, PDHooks, PDParts
from kvxfer.connectors.lmcache.ports import PortServer
from kvxfer.connectors.lmcache.shelf import key_of
from kvxfer.connectors.lmcache.wire import AllocResponse


class KvxferPDBackend(PDHooks, PDBackend):  # type: ignore[misc]
    """Sends prefilled KV, or receives it; LMCache's engine makes it in place of its own."""

    def __init__(self, config: Any, metadata: Any) -> None:
        """Called by LMCache.

        Raises:
            InvalidUsage: wrong settings.
            NotAvailable: a port is taken, or no transport works here.
        """
        self._parts = PDParts(self, config, metadata)
        self._is_closed = False
        self._batch: Any = None  # that is being submitted
        self._query_port: _QueryPort | None = None
        with self._parts.constructing():
            super().__init__(config, metadata)

    def __str__(self) -> str:
        return "PDBackend"  # the name that LMCache's engine looks for

    # A sender.

    def _init_sender(self) -> None:
        # The process's context is everybody's: to end it would end their sockets, or wait for them.
        self.zmq_context = zmq.Context()
        super()._init_sender()
        if self.proxy_side_channel is not None:
            self.proxy_side_channel.setsockopt(zmq.LINGER, NOTICE_LINGER_MS)

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        memory_objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> "list[Future[int]] | None":
        """Send one batch of a request; one that names no receiver stays here.

        Raises:
            KvxferError: the receiver cannot be met, or has no pages for it.
        """
        if not self._parts.may_send(transfer_spec):
            return None
        counts = [one.get_ref_count() for one in memory_objs]
        self._batch = batch = Batch(transfer_spec)
        self._parts.in_flight.begin()
        try:
            futures: list[Future[int]] = super().batched_submit_put_task(
                keys, memory_objs, batch, on_complete_callback
            )
        except Exception:
            self._parts.in_flight.end()
            mark_failed(transfer_spec)
            for one, count in zip(memory_objs, counts, strict=True):
                if one.get_ref_count() > count:
                    one.ref_count_down()
            raise
        # Called by the thread that writes, before it looks at the next batch.
        for future in futures:
            future.add_done_callback(partial(_note_failure, transfer_spec))
            future.add_done_callback(self._parts.in_flight.end)
        return futures

    def _remote_allocate(self, receiver_id: str, alloc_request: Any) -> AllocResponse:
        batch = self._batch
        more: dict[str, object] = {}
        if getattr(batch, "total_chunks", 0):  # what a receiver needs to promise all of it at once
            more["req_id"] = batch.req_id
            more["is_last_batch"] = batch.is_last_prefill
            more["total_chunks"] = batch.total_chunks
        return self._parts.allocate(receiver_id, alloc_request, **more)

    # A receiver.

    def _init_receiver(self) -> None:
        config = self.pd_config
        self._parts.serve(config.peer_host, config.peer_alloc_port)
        if config.peer_query_port is not None:
            self._query_port = _QueryPort(f"{config.peer_host}:{config.peer_query_port}", self)

    def close(self) -> None:
        """End everything within seconds; may be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        self.running = False
        self._parts.close()
        if self._query_port is not None:
            self._query_port.close()
        self._nixl_queue.put(None)
        self.transfer_channel.close()
        for thread in self.running_threads:
            thread.join(timeout=1.0)
        if self.pd_config.role != "receiver":
            self.zmq_context.destroy(linger=NOTICE_LINGER_MS)


class _QueryPort(PortServer):
    """Says which keys are hits here (``pd_peer_query_port``)."""

    def __init__(self, host_and_port: str, backend: KvxferPDBackend) -> None:
        super().__init__(host_and_port, "kvxfer-lmcache-query")
        self._backend = backend
        self.start()

    def answer(self, sender: str, message: bytes, reply: Callable[[bytes], None]) -> None:
        """Answer one message; where it cannot be read, that nothing is here, as LMCache does."""
        found: list[tuple[str, int]] = []
        try:
            found = self._find(msgspec.msgpack.decode(message, type=CacheQueryRequest).keys)
        finally:
            answer = CacheQueryResponse(
                cached_keys=[key for key, _ in found], cached_indexes=[page for _, page in found]
            )
            reply(msgspec.msgpack.encode(answer))

    def _find(self, keys: Sequence[str]) -> list[tuple[str, int]]:
        wanted = [(key, key_of(key)) for key in keys]
        self._backend._parts.arrivals.publish_arrived()
        with self._backend.data_lock:
            data = self._backend.data
            return [
                (name, page.meta.address)
                for name, key in wanted
                if (page := data.get(key)) is not None
            ]


def _note_failure(spec: Any, future: "Future[int]") -> None:
    if future.exception() is not None:
        mark_failed(spec)
