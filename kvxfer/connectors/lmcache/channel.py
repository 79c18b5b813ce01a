"""The channel that LMCache's back ends move pages through, in place of its own.

It speaks LMCache's handshake on ``pd_peer_init_port``, with one field more: a peer that answers
that field is met by kvxfer's endpoint, whose connection notices when the peer ends or is started
anew. Every other peer is served by LMCache's own channel.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from lmcache.v1.transfer_channel.abstract import BaseTransferChannel
from lmcache.v1.transfer_channel.transfer_utils import SideMsg

from kvxfer.connectors.lmcache.lane import Counts, Job, hold_until_over
from kvxfer.connectors.lmcache.peers import Peers
from kvxfer.connectors.lmcache.pool import PagePool, pages_of
from kvxfer.connectors.lmcache.setting import current
from kvxfer.connectors.lmcache.stock import StockChannel
from kvxfer.connectors.lmcache.wire import Grant
from kvxfer.errors import InvalidUsage, TransferTimeout
from kvxfer.session import Peer
from kvxfer.transport import Op

_PEER = {Op.PUT: "receiver_id", Op.GET: "sender_id"}


class KvxferChannel(BaseTransferChannel):  # type: ignore[misc]
    """Pages of one pool to and from the pools of peers.

    A write returns when the pages are visible to the peer and, where it granted them, when it knows
    so. One that raises has ended; pages of one that is late are held until it has.
    """

    def __init__(
        self,
        *,
        async_mode: bool,
        buffer_ptr: int,
        buffer_size: int,
        align_bytes: int,
        peer_init_url: str | None,
        device: str | None,
        make_stock: Callable[[], Any],
        peer_lookup_url: str | None = None,
    ) -> None:
        """For the pool at ``buffer_ptr``, of pages of ``align_bytes``.

        Args:
            async_mode: whether the back end awaits its transfers.
            buffer_ptr: address of the pool.
            buffer_size: its bytes.
            align_bytes: of one page.
            peer_init_url: ``host:port`` where senders come; None where none do.
            device: ``cpu``, or the torch device of the pool.
            make_stock: LMCache's own channel for the same pool, which listens nowhere.
            peer_lookup_url: what LMCache's P2P tells its peers.

        Raises:
            InvalidUsage: a pool, host or setting that cannot be used.
            NotAvailable: a port is taken, or no transport works here.
        """
        self._setting = setting = current()
        self.peer_lookup_url = peer_lookup_url
        self._grants: dict[tuple[str, tuple[int, ...]], tuple[Grant, Peer]] = {}
        self._lock = threading.Lock()
        is_device = device is not None and device.partition(":")[0] != "cpu"
        self._pool = PagePool(buffer_ptr, buffer_size, align_bytes, is_device=is_device)
        stock = StockChannel(
            make_stock, is_async=async_mode, timeout_s=setting.options.connect_timeout_s
        )
        try:
            self._peers = Peers(setting, self._pool, stock, peer_init_url)
        except BaseException:
            self._pool.close()
            raise

    def lazy_init_peer_connection(
        self, local_id: str, peer_id: str, peer_init_url: str, init_side_msg: Any = None
    ) -> Any:
        """Meet the peer at ``peer_init_url``; returns the answer to ``init_side_msg``, if any.

        Raises:
            KvxferError: what `Peers.meet` raises.
        """
        if not self._peers.meet(local_id, peer_id, peer_init_url):
            return self._peers.stock.meet(local_id, peer_id, peer_init_url, init_side_msg)
        if init_side_msg is None:
            return None
        return self._peers.ask_side(peer_init_url, init_side_msg, SideMsg)

    async def async_lazy_init_peer_connection(
        self, local_id: str, peer_id: str, peer_init_url: str, init_side_msg: Any = None
    ) -> Any:
        """The same, without holding the loop up."""
        return await asyncio.to_thread(
            self.lazy_init_peer_connection, local_id, peer_id, peer_init_url, init_side_msg
        )

    def remote_xfer_handler_exists(self, receiver_or_sender_id: str) -> bool:
        """Whether that peer can be written to, as far as is known here."""
        return self._peers.can_reach(receiver_or_sender_id)

    # What the PD back ends of this package ask beyond LMCache's interface.

    def connection_to(self, peer_id: str) -> Peer | None:
        """The connection to a peer, met anew if need be; None without kvxfer.

        Raises:
            KvxferError: it cannot be met.
        """
        lane = self._peers.lane_to(peer_id)
        return None if lane is None else lane.connect()

    def is_lost(self, peer_id: str) -> bool:
        """Whether a peer with kvxfer has ended."""
        lane = self._peers.lane_to(peer_id)
        return lane is not None and not lane.is_open

    def granted(self, peer_id: str, remote_indexes: Sequence[int], grant: Grant, to: Peer) -> None:
        """Note the grant of exactly these pages, and the connection that has it."""
        with self._lock:
            self._grants[(peer_id, tuple(remote_indexes))] = grant, to

    def counts(self) -> dict[str, Counts]:
        """What went to each peer with kvxfer."""
        return self._peers.counts()

    # Moving pages.

    def get_local_mem_indices(self, objects: Sequence[Any]) -> list[int]:
        """The page number of each object."""
        return [one.meta.address for one in objects]

    def batched_write(self, objects: Sequence[Any], transfer_spec: Any = None) -> int:
        """Write objects to the pages ``remote_indexes`` of ``receiver_id``; returns how many.

        Raises:
            KvxferError: they are not all there; the message says why.
        """
        done = self._start(objects, transfer_spec, Op.PUT)
        if done is None:
            return int(self._peers.stock.channel.batched_write(objects, transfer_spec))
        return self._wait(done, objects)

    def batched_read(self, buffers: Sequence[Any], transfer_spec: Any = None) -> int:
        """Read the pages ``remote_indexes`` of ``sender_id``; for errors see a write."""
        done = self._start(buffers, transfer_spec, Op.GET)
        if done is None:
            return int(self._peers.stock.channel.batched_read(buffers, transfer_spec))
        return self._wait(done, buffers)

    async def async_batched_write(self, objects: Sequence[Any], transfer_spec: Any = None) -> int:
        """A write that is awaited. Cancelled, it holds the objects until it has ended."""
        done = self._start(objects, transfer_spec, Op.PUT)
        if done is None:
            return int(await self._peers.stock.channel.async_batched_write(objects, transfer_spec))
        return await self._await(done, objects)

    async def async_batched_read(self, buffers: Sequence[Any], transfer_spec: Any = None) -> int:
        """A read that is awaited."""
        done = self._start(buffers, transfer_spec, Op.GET)
        if done is None:
            return int(await self._peers.stock.channel.async_batched_read(buffers, transfer_spec))
        return await self._await(done, buffers)

    def batched_send(self, objects: Any, transfer_spec: Any = None) -> int:
        """No back end calls it; LMCache's own channel has none either."""
        raise NotImplementedError

    def batched_recv(self, buffers: Any, transfer_spec: Any = None) -> int:
        """As `batched_send`."""
        raise NotImplementedError

    async def async_batched_send(self, objects: Any, transfer_spec: Any = None) -> int:
        """As `batched_send`."""
        raise NotImplementedError

    async def async_batched_recv(self, buffers: Any, transfer_spec: Any = None) -> int:
        """As `batched_send`."""
        raise NotImplementedError

    def close(self) -> None:
        """End what is in flight, unmap peers and free the port; may be called more than once."""
        self._peers.close()
        self._pool.close()

    def _start(self, objects: Sequence[Any], spec: Any, op: Op) -> "Future[int] | None":
        """Queue a batch; None where LMCache's own channel takes it."""
        if spec is None:
            raise InvalidUsage("a transfer without transfer_spec; name the peer and its pages")
        peer_id, indexes = spec[_PEER[op]], spec["remote_indexes"]
        lane = self._peers.lane_to(peer_id) if objects else None
        if lane is None:
            if objects:
                return None
            nothing: Future[int] = Future()
            nothing.set_result(0)
            return nothing
        with self._lock:
            grant, granted_to = self._grants.pop((peer_id, tuple(indexes)), (None, None))
        after = self._setting.written() if op is Op.PUT else None
        plan = partial(self._pool.plan, pages_of(objects, indexes), op)
        job = Job(plan, len(objects), op, grant, granted_to, after)
        lane.submit(job)
        return job.done

    def _wait(self, done: "Future[int]", objects: Sequence[Any]) -> int:
        limit_s = self._setting.options.write_timeout_s
        if not wait([done], limit_s).done:
            _hold(done, objects)
            raise _late(objects, limit_s)
        return done.result()

    async def _await(self, done: "Future[int]", objects: Sequence[Any]) -> int:
        limit_s = self._setting.options.write_timeout_s
        waiting = asyncio.wrap_future(done)
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), limit_s)
        except asyncio.CancelledError:
            _hold(done, objects)
            raise
        except (TimeoutError, asyncio.TimeoutError) as error:
            if done.done():
                raise
            _hold(done, objects)
            raise _late(objects, limit_s) from error


def _hold(done: "Future[int]", objects: Sequence[Any]) -> None:
    """Keep the pages of a batch that nobody waits for until nobody moves them any more."""
    for one in objects:
        one.ref_count_up()

    def let_go() -> None:
        for one in objects:
            one.ref_count_down()

    hold_until_over(done, let_go)


def _late(objects: Sequence[Any], limit_s: float) -> TransferTimeout:
    return TransferTimeout(
        f"{len(objects)} pages were not over there within {limit_s} s; they stay reserved on both "
        "sides until they are (kvxfer.write_timeout_s)"
    )
