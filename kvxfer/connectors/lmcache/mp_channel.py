"""A transfer channel for LMCache's multiprocess server: reads between the L1 memories of peers.

LMCache's registry makes it for ``--p2p-transfer-engine kvxfer`` once this module was imported. Of
the memory it describes base and size, where NIXL's channel lists every 4 KiB of it.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from lmcache.v1.distributed.transfer_channel.abstract import (
    TransferChannelClient,
    TransferChannelContext,
    TransferChannelServer,
)
from lmcache.v1.distributed.transfer_channel.api import (
    TransferChannelAddress,
    TransferChannelReadResult,
)

from kvxfer.connectors.lmcache.greeting import calling
from kvxfer.connectors.lmcache.lane import Job, Lane
from kvxfer.connectors.lmcache.pool import PagePool
from kvxfer.connectors.lmcache.ports import PortServer
from kvxfer.connectors.lmcache.serving import serve
from kvxfer.connectors.lmcache.wire import Hello, decode, encode
from kvxfer.errors import InvalidUsage, ProtocolMismatch
from kvxfer.layout import CopyBox, CopyPlan
from kvxfer.session import Endpoint
from kvxfer.transport import Op, Tuning

_log = logging.getLogger(__name__)
_CONNECT_S = 10.0
NAME = "kvxfer"
Ranges = Sequence[tuple[int, int]]
"""(offset, bytes) of pieces of an L1 memory."""


class KvxferContext(TransferChannelContext):  # type: ignore[misc]
    """One process's L1 memory, served to peers and read from them."""

    def __init__(self, l1_memory_desc: Any, listen_url: str, advertise_url: str, **_: Any) -> None:
        """Serve the memory at ``listen_url`` (host:port).

        Raises:
            InvalidUsage: memory or hosts that cannot be used.
            NotAvailable: the port is taken, or no transport works here.
        """
        memory, page_bytes = l1_memory_desc, l1_memory_desc.align_bytes
        # A size in GB may end within a page, in which LMCache places nothing.
        self._size = memory.size // page_bytes * page_bytes
        self._clients: dict[str, _Client] = {}
        self._lock = threading.Lock()
        self._pool = PagePool(memory.ptr, self._size, page_bytes, is_device=False)
        host, advertised = (url.rpartition(":")[0] for url in (listen_url, advertise_url))
        with ExitStack() as made:  # whatever fails gives back what was made
            made.callback(self._pool.close)
            self._endpoint = serve(self._pool, host, advertise_host=advertised)
            made.callback(self._endpoint.close)
            self._server = _Server(listen_url, Hello(addresses=self._endpoint.addresses))
            made.pop_all()

    def get_transfer_channel_server(self) -> TransferChannelServer:
        """What peers greet."""
        return self._server

    def get_transfer_channel_client(self, peer_advertise_url: str) -> TransferChannelClient:
        """The connection to the peer at that URL, made if there is none.

        Raises:
            KvxferError: it cannot be met.
        """
        with self._lock:
            client = self._clients.get(peer_advertise_url)
            if client is None:
                client = _Client(peer_advertise_url, self._endpoint, self._pool)
                self._clients[peer_advertise_url] = client
            return client

    def remove_transfer_channel_client(self, peer_advertise_url: str) -> None:
        """End the connection to the peer at that URL, if there is one."""
        with self._lock:
            client = self._clients.pop(peer_advertise_url, None)
        if client is not None:
            client.close()

    def get_transfer_channel_address(
        self, lmcache_addresses: list[tuple[int, int]]
    ) -> list[TransferChannelAddress]:
        """Addresses of pieces of this memory.

        Raises:
            InvalidUsage: a piece that does not lie in it.
        """
        _require_inside(lmcache_addresses, self._size, "this L1 memory")
        return [TransferChannelAddress(offset, size) for offset, size in lmcache_addresses]

    def get_num_connected_clients(self) -> int:
        """Connections to peers."""
        return len(self._clients)

    def close(self) -> None:
        """End everything; may be called more than once."""
        for url in list(self._clients):
            self.remove_transfer_channel_client(url)
        self._server.close()
        self._endpoint.close()
        self._pool.close()


class _Server(PortServer, TransferChannelServer):  # type: ignore[misc]
    """Says where this side's endpoint is."""

    def __init__(self, listen_url: str, own: Hello) -> None:
        super().__init__(listen_url, "kvxfer-lmcache-mp")
        self._own = encode(own)
        self.start()

    def answer(self, sender: str, message: bytes, reply: Callable[[bytes], None]) -> None:
        decode(message, Hello)
        reply(self._own)


class _Client(TransferChannelClient):  # type: ignore[misc]
    """Reads from one peer."""

    def __init__(self, url: str, endpoint: Endpoint, pool: PagePool) -> None:
        self._pool = pool
        self._tasks: dict[int, Job] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        own = encode(Hello(addresses=endpoint.addresses))

        def greet() -> Hello:
            with calling(url, _CONNECT_S) as caller:
                return decode(caller.call(own), Hello)

        self._lane = Lane(url, endpoint, greet, tuning=Tuning(), connect_timeout_s=_CONNECT_S)
        try:
            self._lane.connect()
        except BaseException:
            self._lane.close()
            raise

    def submit_read(self, local_addresses: Any, remote_addresses: Any) -> int:
        """Start to read; returns the number of the task.

        Raises:
            InvalidUsage: unequal pieces, or the connection is closed.
        """
        near = [(one.offset, one.size) for one in local_addresses]
        far = [(one.offset, one.size) for one in remote_addresses]
        if [size for _, size in near] != [size for _, size in far]:
            raise InvalidUsage(f"{len(near)} pieces here are not as large as {len(far)} there")
        job = Job(partial(self._plan, near, far), len(near), Op.GET)
        self._lane.submit(job)
        with self._lock:
            number = next(self._ids)
            self._tasks[number] = job
        return number

    def query_read_status(self, task_id: int) -> TransferChannelReadResult:
        """Whether a task has ended, and if so, whether its pieces are here; told once.

        Raises:
            KeyError: no such task.
        """
        with self._lock:
            job = self._tasks[task_id]
            if not job.done.done():
                return TransferChannelReadResult(finished=False, succeeded_mask=[])
            del self._tasks[task_id]
        error = job.done.exception()
        if error is not None:
            _log.warning("a read of %d pieces failed: %s", job.count, error)
        return TransferChannelReadResult(finished=True, succeeded_mask=[error is None] * job.count)

    def close(self) -> None:
        """Wait for what is in flight, and unmap the peer; may be called more than once."""
        self._lane.close()

    def _plan(self, near: Ranges, far: Ranges, far_address: int, far_pages: int) -> CopyPlan:
        here, page = self._pool.num_pages * self._pool.page_bytes, self._pool.page_bytes
        _require_inside(near, here, "this L1 memory")
        _require_inside(far, far_pages * page, "the peer's L1 memory")
        return ranges_plan(far_address, far, self._pool.address, near)


def ranges_plan(src_address: int, src: Ranges, dst_address: int, dst: Ranges) -> CopyPlan:
    """The copy of each piece of ``src`` to the piece of ``dst`` of the same size."""
    boxes, first = [], 0
    for size, run in itertools.groupby(size for _, size in src):
        count = sum(1 for _ in run)
        boxes.append(CopyBox(first, count, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, size))
        first += count
    return CopyPlan(
        np.array([src_address + offset for offset, _ in src], np.uint64),
        np.array([dst_address + offset for offset, _ in dst], np.uint64),
        segments=np.zeros((1, 4), np.uint32),
        boxes=tuple(boxes),
    )


def _require_inside(ranges: Ranges, limit: int, what: str) -> None:
    for offset, size in ranges:
        if offset < 0 or size < 1 or offset + size > limit:
            raise ProtocolMismatch(f"{size} bytes at {offset} of {what}, which has {limit}")


def register() -> None:
    """Offer the channel to LMCache's registry; once a process."""
    from lmcache.v1.distributed.transfer_channel import factory

    if NAME not in factory._TRANSFER_CHANNEL_FACTORY_REGISTRY:
        factory.register_transfer_channel_factory(NAME, KvxferContext)
