"""The decode side: requests that senders write into a cache, and how each of them ended."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from kvxfer.closing import Closing
from kvxfer.control import SharedKey
from kvxfer.memory import KVCache
from kvxfer.session.block_pool import BlockPool
from kvxfer.session.endpoint import ChannelPorts, Endpoint
from kvxfer.session.offers import Notice, OnReserve
from kvxfer.session.placement import Placement, PoolPlacement, SchedulerPlacement
from kvxfer.session.request_book import RequestBook
from kvxfer.session.requests import Writers
from kvxfer.session.states import ReceiveLimits

OnFree = Callable[[str, tuple[int, ...]], None]


class Receiver(Closing):
    """Takes requests from senders. A context manager.

    Every request that asked for blocks ends in exactly one :class:`Notice`, once all ranks that
    share it have committed or once it has failed. Its blocks are written by nobody then, unless the
    notice says that they are in quarantine. One background thread serves all senders.

    Attributes:
        endpoint: the low layer, which may connect to others too.
        addresses: what senders need: ``endpoint.addresses``.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        transport: str = "auto",
        num_threads: int | None = None,
        bind_host: str = "127.0.0.1",
        ports: ChannelPorts | None = None,
        advertise_host: str | None = None,
        key: SharedKey | None = None,
        insecure: bool = False,
        strict: bool = False,
        limits: ReceiveLimits | None = None,
        on_reserve: OnReserve | None = None,
        on_notice: Callable[[Notice], None] | None = None,
        on_free: OnFree | None = None,
    ) -> None:
        """Serve ``cache``.

        Args:
            cache: what senders write into.
            transport: see :class:`Endpoint`, as are all up to ``insecure``.
            num_threads: threads of host copies that start here.
            bind_host: address of both channels, and of a transport that listens.
            ports: port of ``init`` and of ``alloc``, or the `kvxfer.control.Ports` of all ranks.
            advertise_host: the host in ``addresses``.
            key: admits its holders alone.
            insecure: bind beyond loopback without a key.
            strict: of connections that are made from here; a sender judges its own.
            limits: how long to wait for what.
            on_reserve: chooses the blocks of a request: returns integers ``[n]`` (where layers form
                groups a list of such, one a group), a `Granted`, a `Refused` or a `Deferred`. It
                must be quick: it runs on the thread that serves all senders. Without it the blocks
                come from a pool of all blocks of the cache, first come first served, and
                :meth:`release` gives them back.
            on_notice: takes the notices, on the same thread or on that of a call here, instead of
                :meth:`poll` and :meth:`next_notice`. It must be quick and must not close this.
            on_free: gets the request id and the blocks when a quarantine is over, or when what
                ``on_reserve`` gave at once was not taken, because the request ended meanwhile.

        Raises:
            InvalidUsage: unusable hosts or ports, or ``bind_host`` is beyond loopback and there is
                neither ``key`` nor ``insecure``.
            NotAvailable: the transport does not work here, a port is in use, and why.
            RegistrationError: the cache's memory cannot be exported.
        """
        self._limits = limits or ReceiveLimits()
        self._shard = cache.shard
        self._on_notice = on_notice
        self._on_free = on_free
        size = (cache.num_blocks, cache.shard.model)
        self._pool = BlockPool(cache.num_blocks)
        self._placement: Placement = (
            PoolPlacement(self._pool, *size)
            if on_reserve is None
            else SchedulerPlacement(on_reserve, *size)
        )
        self._notices: deque[Notice] = deque()
        self._changed = threading.Condition()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._book: RequestBook
        self.endpoint = Endpoint(
            cache,
            transport=transport,
            num_threads=num_threads,
            bind_host=bind_host,
            ports=ports,
            advertise_host=advertise_host,
            key=key,
            insecure=insecure,
            strict=strict,
            requests=self._open_book,
        )
        self.addresses = self.endpoint.addresses

    def poll(self, timeout_s: float = 0.0) -> Notice | None:
        """The next notice, waited for up to ``timeout_s``; None where there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._notices, timeout_s)
            return self._notices.popleft() if self._notices else None

    async def next_notice(self) -> Notice:
        """The next notice, without blocking the event loop."""
        entry = (asyncio.get_running_loop(), asyncio.Event())
        self._waiting.add(entry)
        try:
            while (notice := self.poll()) is None:
                await entry[1].wait()
                entry[1].clear()
            return notice
        finally:
            self._waiting.discard(entry)

    def abort(self, request_id: str, reason: str = "the engine gave it up") -> None:
        """Fail a request that is open; of any other this changes nothing.

        Its notice comes once no sender writes to it any more, or says that one still may.
        """
        self._book.give_up(request_id, reason)

    def release(self, request_id: str) -> None:
        """Give the blocks of a committed request back to the pool; again, it changes nothing.

        Raises:
            InvalidUsage: a sender may still write to it.
        """
        self._book.release(request_id)

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the pool that no request holds; not of use with ``on_reserve``."""
        return self._pool.num_free

    @property
    def num_open(self) -> int:
        """Requests that have not ended, or whose blocks are in quarantine."""
        return self._book.num_open

    def close(self) -> None:
        """Stop serving, withdraw the cache, and fail the requests that are open."""
        self.endpoint.close()
        self._book.close()

    def _open_book(self, writers: Writers) -> RequestBook:
        shard = self._shard
        self._book = RequestBook(
            writers,
            self._placement,
            num_pairs=len(shard.layers) * len(shard.heads),
            limits=self._limits,
            on_notice=self._on_notice or self._keep,
            on_free=self._on_free or (lambda request_id, block_ids: None),
            num_unread=lambda: len(self._notices),
        )
        return self._book

    def _keep(self, notice: Notice) -> None:
        with self._changed:
            self._notices.append(notice)
            self._changed.notify()
        for loop, event in list(self._waiting):
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)
