"""A connection to another process's cache."""

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvxfer.closing import Closing
from kvxfer.control import (
    AbortRequest,
    CommitRequest,
    ControlClient,
    Done,
    InitReply,
    InitRequest,
    LeaveRequest,
    ReserveReply,
    ReserveRequest,
)
from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable, ProtocolMismatch, TransferTimeout
from kvxfer.layout import CopyPlan, KVLayout, KVView, plan
from kvxfer.layout.plan import BlockIds
from kvxfer.memory import KVCache
from kvxfer.session.connections import ConnectionNames
from kvxfer.session.layouts import layout_spec
from kvxfer.transport import Link, Op, Transfer, Transport, Tuning

# A peer that is gone does not answer; its board is gone with it.
_LEAVE_S = 0.5
_log = logging.getLogger(__name__)


class Peer(Closing):
    """A peer's cache, reachable from this process. A context manager.

    Attributes:
        incarnation: which start of the peer this is.
        connection: the name of this connection, which the far side's :meth:`kvxfer.Endpoint.wait`
            and :class:`BlockPool` know it by: the connecting endpoint's incarnation, with a number
            behind it where that endpoint has another connection open to the same peer.
        view: the peer's pages, at the addresses that this link's copies use.
        link: the transport's link.
    """

    def __init__(
        self,
        cache: KVCache,
        transport: Transport,
        *,
        names: ConnectionNames,
        addresses: Mapping[str, str],
        deadline_s: float,
    ) -> None:
        """Use :meth:`kvxfer.Endpoint.connect`."""
        missing = {"init", "alloc"} - set(addresses)
        if missing:
            raise InvalidUsage(f"addresses lack {', '.join(sorted(missing))}; pass both channels")
        self._cache = cache
        at = addresses["init"]
        self._alloc = ControlClient(addresses["alloc"], (ReserveReply, Done), deadline_s=deadline_s)
        self._closed = False
        try:
            with ControlClient(at, InitReply, deadline_s=deadline_s) as init:
                while True:
                    self.connection = names.propose(at)
                    reply = init.call(
                        InitRequest(
                            incarnation=self.connection,
                            layout=layout_spec(cache.layout),
                            transports=[transport.name],
                        )
                    )
                    if names.claim(at, reply.incarnation, self.connection):
                        break
        except BaseException:
            self._alloc.close()
            raise
        self.incarnation = reply.incarnation
        self._epoch = reply.epoch
        self._give_back: Callable[[], object] = partial(
            names.give_back, self.incarnation, self.connection
        )
        try:
            self.link: Link = transport.link(cache, reply.regions, reply.board)
            # Goes with the link, not the peer: a transfer in flight keeps it, and its slot busy.
            self._give_back = weakref.finalize(self.link, self._give_back)
            self.view = _remote_view(reply, self.link)
        except BaseException:
            self._leave()
            self._give_back()
            raise

    def reserve(
        self, request_id: str, num_blocks: int, *, timeout_s: float = 10.0
    ) -> NDArray[np.int64]:
        """Reserve ``num_blocks`` blocks of the peer's pool; returns their ids, int64.

        Raises:
            TransferTimeout: the pool stayed too full for ``timeout_s``.
            NotAvailable: the peer refuses, and why.
            RegistrationError: the peer's cache is another one by now; connect again.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            reply = self._alloc.call(
                ReserveRequest(
                    request_id=request_id,
                    num_blocks=num_blocks,
                    epoch=self._epoch,
                    incarnation=self.connection,
                )
            )
            if not isinstance(reply, ReserveReply):
                raise ProtocolMismatch(f"the peer answered a reservation with {type(reply)}")
            if reply.state == "granted":
                return self._checked_ids(reply.block_ids, num_blocks)
            if reply.state == "refused":
                raise NotAvailable(f"the peer refused request {request_id!r}: {reply.reason}")
            pause_s = min(max(reply.retry_after_s, 0.001), 1.0)
            if time.monotonic() + pause_s > deadline:
                raise TransferTimeout(
                    f"{num_blocks} blocks for request {request_id!r} were not free within "
                    f"{timeout_s} s"
                )
            time.sleep(pause_s)

    def commit(self, request_id: str) -> None:
        """Tell the peer that the request's pages are filled: all its transfers are complete.

        From now on the blocks are the peer's engine's, which alone frees them.
        """
        self._alloc.call(CommitRequest(request_id, self.connection))

    def abort(self, request_id: str) -> None:
        """Give the request's blocks back. Only once every transfer to them is complete.

        Of a committed request, or one that holds nothing, this changes nothing.
        """
        self._alloc.call(AbortRequest(request_id, self.connection))

    def plan(self, op: Op, local_block_ids: BlockIds, remote_block_ids: BlockIds) -> CopyPlan:
        """What :meth:`put` or :meth:`get` would copy.

        Raises:
            InvalidUsage: ids out of range, of unequal number, or twice on the destination.
            RegistrationError: this side's cache was closed or its memory freed.
        """
        self._cache.require_live()
        if op is Op.PUT:
            return plan(self._cache.view, self.view, local_block_ids, remote_block_ids)
        return plan(self.view, self._cache.view, remote_block_ids, local_block_ids)

    def put(
        self,
        local_block_ids: BlockIds,
        remote_block_ids: BlockIds,
        *,
        tuning: Tuning | None = None,
        after_stream: int | None = None,
    ) -> Transfer:
        """Write local blocks into the peer's. See :meth:`plan` and :meth:`Link.post` for errors."""
        copy = self.plan(Op.PUT, local_block_ids, remote_block_ids)
        return self.link.post(copy, Op.PUT, tuning=tuning, after_stream=after_stream)

    def get(
        self,
        remote_block_ids: BlockIds,
        local_block_ids: BlockIds,
        *,
        tuning: Tuning | None = None,
        after_stream: int | None = None,
    ) -> Transfer:
        """Read the peer's blocks into local ones. For errors see :meth:`put`."""
        copy = self.plan(Op.GET, local_block_ids, remote_block_ids)
        return self.link.post(copy, Op.GET, tuning=tuning, after_stream=after_stream)

    def close(self) -> None:
        """Unmap the peer's cache and end the connection; may be called more than once.

        Raises:
            TransferTimeout: transfers in flight did not end; nothing was unmapped, and
                closing again waits again.
        """
        if self._closed:
            return
        self.link.close()
        self._leave()
        self._give_back()  # after leaving, so that the next to use the slot is not taken for idle

    def _leave(self) -> None:
        """Tell the peer, which may be gone by now, that nothing more comes from here."""
        self._closed = True
        try:
            self._alloc.call(LeaveRequest(self.connection), deadline_s=_LEAVE_S)
        except KvxferError as error:
            _log.info("leaving peer %s: %s", self.incarnation, error)
        finally:
            self._alloc.close()

    def _checked_ids(self, block_ids: list[int], num_blocks: int) -> NDArray[np.int64]:
        ids = np.array(block_ids, dtype=np.int64)
        if ids.size != num_blocks or (ids.size and ids.max() >= self.view.num_blocks):
            raise ProtocolMismatch(
                f"the peer granted {ids.size} blocks up to id {ids.max(initial=-1)}; wanted "
                f"{num_blocks} of a cache of {self.view.num_blocks}"
            )
        return ids


def _remote_view(reply: InitReply, link: Link) -> KVView:
    """The peer's planes at the link's addresses, after every one was found inside its region."""
    layout = KVLayout(**msgspec.structs.asdict(reply.layout))
    addresses = np.array(
        [int(link.region_addresses[plane.region]) + plane.offset_bytes for plane in reply.planes],
        dtype=np.uint64,
    )
    view = KVView(
        layout,
        reply.num_blocks,
        plane_addresses=addresses,
        block_stride_bytes=reply.block_stride_bytes,
    )
    for index, plane in enumerate(reply.planes):
        region_bytes = link.region_bytes[plane.region]
        if plane.offset_bytes + view.plane_span_bytes > region_bytes:
            raise ProtocolMismatch(
                f"plane {index} of the peer spans {view.plane_span_bytes} bytes from offset "
                f"{plane.offset_bytes}, but its region has {region_bytes}"
            )
    return view
