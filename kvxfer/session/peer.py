"""A connection to another process's cache."""

import os
import time
import weakref
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from kvxfer.closing import Closing
from kvxfer.control import (
    AbortRequest,
    CommitRequest,
    ControlClient,
    Done,
    InitReply,
    ReserveReply,
    ReserveRequest,
    SharedKey,
)
from kvxfer.errors import InvalidUsage, NotAvailable, ProtocolMismatch, TransferTimeout
from kvxfer.layout import (
    BlockMap,
    Blocks,
    CopyPlan,
    KVShard,
    KVView,
    Route,
    Share,
    ToFp8,
    match_blocks,
    shares,
)
from kvxfer.memory import KVCache
from kvxfer.session.connections import ConnectionNames
from kvxfer.session.layouts import require_joinable, shard_of
from kvxfer.session.meeting import (
    init_request,
    leave,
    offers_to,
    require_addresses,
    require_scales,
)
from kvxfer.session.routes import Routes
from kvxfer.transport import After, Link, Op, Transfer, TransportOffers, Transports, Tuning


class Peer(Closing):
    """A peer's cache, reachable from this process. A context manager.

    Attributes:
        incarnation: which start of the peer this is.
        connection: the name of this connection, which the far side's :meth:`kvxfer.Endpoint.wait`
            and :class:`BlockPool` know it by: the connecting endpoint's incarnation, with a number
            behind it where that endpoint has another connection open to the same peer.
        view: the peer's cache, at the addresses that this link's copies use; ``view.shard`` says
            which part of the model it is.
        link: the transport's link.
        epoch: which registration of the peer's memory this is.
    """

    def __init__(
        self,
        cache: KVCache,
        offers: TransportOffers,
        *,
        names: ConnectionNames,
        connection: str,
        reply: InitReply,
        alloc_address: str,
        convert: ToFp8 | None,
        key: SharedKey | None = None,
        deadline_s: float = 10.0,
    ) -> None:
        """Map what ``reply`` describes; use :meth:`kvxfer.Endpoint.connect`.

        ``connection`` was claimed of ``names``, where it stays claimed if this fails.
        """
        self._cache = cache
        self._alloc_address, self._key, self._deadline_s = alloc_address, key, deadline_s
        self._alloc: ControlClient[ReserveReply | Done] | None = None
        self._closed = False
        self._pid = os.getpid()
        self.connection = connection
        self.incarnation = reply.incarnation
        self.epoch = reply.epoch
        shard = shard_of(reply.layout, reply.rank)
        require_joinable(cache.shard.model, shard.model, convert)
        transport = offers.get(reply.transport)
        self.link: Link = transport.link(cache, reply.regions, reply.board)
        try:
            offers.took(reply.transport, self.link.path, reply.board)
            self.view = _remote_view(shard, reply, self.link)
            self._routes = Routes(cache.view, self.view, convert)
        except BaseException:
            self.link.close()
            raise
        # Goes with the link, not the peer: a transfer in flight keeps it, and its slot busy.
        self._give_back = weakref.finalize(self.link, names.give_back, self.incarnation, connection)

    @classmethod
    def meet(
        cls,
        cache: KVCache,
        transports: Transports,
        *,
        names: ConnectionNames,
        addresses: Mapping[str, str],
        convert: ToFp8 | None,
        key: SharedKey | None,
        deadline_s: float,
    ) -> "Peer":
        """Meet whoever is at ``addresses``; for the rest see :meth:`kvxfer.Endpoint.connect`."""
        require_addresses(addresses)
        require_scales(cache, convert)
        at = addresses["init"]
        offers = offers_to(transports, at)
        with ControlClient(at, InitReply, deadline_s=deadline_s, key=key) as init:
            while True:
                connection = names.propose(at)
                try:
                    reply = init.call(init_request(cache, offers.names, connection, convert))
                except NotAvailable as error:
                    raise offers.exhausted(error) from None
                if not names.claim(at, reply.incarnation, connection):
                    continue
                try:
                    return cls(
                        cache,
                        offers,
                        names=names,
                        connection=connection,
                        reply=reply,
                        alloc_address=addresses["alloc"],
                        convert=convert,
                        key=key,
                        deadline_s=deadline_s,
                    )
                except BaseException as error:
                    if leave(addresses["alloc"], connection, key):
                        names.give_back(reply.incarnation, connection)
                    if not isinstance(error, NotAvailable):
                        raise
                    offers.drop(reply.transport, error)

    def reserve(
        self, request_id: str, num_blocks: int, *, timeout_s: float = 10.0
    ) -> NDArray[np.int64]:
        """Reserve ``num_blocks`` blocks of the peer's pool; returns their ids, int64.

        Equal ids of two connections are two requests with blocks of their own: where several ranks
        send one request, one of them reserves and tells the others the ids. A :class:`Sender` does
        that by itself.

        Raises:
            TransferTimeout: the pool stayed too full for ``timeout_s``.
            ControlTimeout: the peer did not answer within ``timeout_s``.
            NotAvailable: the peer refuses, and why.
            RegistrationError: the peer's cache is another one by now; connect again.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            reply = self._channel().call(
                ReserveRequest(
                    request_id=request_id,
                    num_blocks=num_blocks,
                    epoch=self.epoch,
                    incarnation=self.connection,
                ),
                deadline_s=max(deadline - time.monotonic(), 0.001),
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

    def commit(self, request_id: str, sequence: int = 0) -> None:
        """Tell the peer that the request's pages are filled: all its transfers are complete.

        From now on the blocks are the peer's engine's, which alone frees them.

        Args:
            request_id: as it was reserved.
            sequence: :attr:`Transfer.sequence` of the last transfer, which the peer looks for on
                its board; 0 = not said. A pool of LMCache's takes the commit of a transfer that is
                under way, and the blocks are its engine's once that has ended.

        Raises:
            InvalidUsage: the request holds nothing, or the peer does not see that transfer yet.
        """
        self._channel().call(CommitRequest(request_id, self.connection, sequence))

    def abort(self, request_id: str) -> None:
        """Give the request's blocks back. Only once every transfer to them is complete.

        Of a request that is committed and filled, or holds nothing, this changes nothing.
        """
        self._channel().call(AbortRequest(request_id, self.connection))

    @property
    def near(self) -> KVShard:
        """The part of the model that this side holds."""
        return self._cache.shard

    @property
    def near_view(self) -> KVView:
        """This side's cache."""
        return self._cache.view

    def shares(self, op: Op) -> tuple[Share, ...]:
        """The layers and heads that :meth:`put` or :meth:`get` moves; empty where it moves none.

        Numbered as in the whole model. Both sides can work them out, so both know who sends what.
        """
        near, far = self.near, self.view.shard
        return shares(near, far) if op is Op.PUT else shares(far, near)

    def route(self, op: Op, layers: Collection[int] | None = None) -> Route:
        """What :meth:`put` or :meth:`get` copies of any request; kept for the next.

        Raises:
            LayoutMismatch: the dtypes forbid this direction.
            InvalidUsage: the conversion's scales have another shape than the model.
        """
        return self._routes.of(op, layers)

    def plan(
        self,
        op: Op,
        local_blocks: Blocks,
        remote_blocks: Blocks,
        *,
        tokens: range | None = None,
        layers: Collection[int] | None = None,
    ) -> CopyPlan:
        """What :meth:`put` or :meth:`get` would copy; of 0 pages where it has nothing to move.

        Args:
            op: the direction.
            local_blocks: block ids ``[n]`` of the request here, in the order of its tokens, a
                `BlockTable` that does not begin at token 0, or `BlockTables`, one for each group
                of layers.
            remote_blocks: the same at the peer.
            tokens: which tokens of the request; None = all slots of the blocks, where both sides
                have equally many.
            layers: only these, numbered as in the whole model; None = all.

        Raises:
            InvalidUsage: ids out of range or twice on the destination, or tokens that the blocks
                do not hold.
            LayoutMismatch: the dtypes forbid this direction.
            RegistrationError: this side's cache was closed or its memory freed.
        """
        near, far = (self._cache.view, local_blocks), (self.view, remote_blocks)
        (src, src_blocks), (dst, dst_blocks) = (near, far) if op is Op.PUT else (far, near)
        matched = match_blocks(src, dst, src_blocks, dst_blocks, tokens=tokens)
        return self.plan_matched(op, matched, layers=layers)

    def plan_matched(
        self, op: Op, blocks: BlockMap, *, layers: Collection[int] | None = None
    ) -> CopyPlan:
        """:meth:`plan` of block tables that were matched once for several peers.

        Raises:
            InvalidUsage: the tables are of other block sizes, or ids are outside a cache.
            LayoutMismatch: the dtypes forbid this direction.
            RegistrationError: this side's cache was closed or its memory freed.
        """
        self._cache.require_live()
        return self._routes.of(op, layers).plan(blocks)

    def put(
        self,
        local_blocks: Blocks,
        remote_blocks: Blocks,
        *,
        tokens: range | None = None,
        layers: Collection[int] | None = None,
        tuning: Tuning | None = None,
        after: After = None,
    ) -> Transfer:
        """Write local blocks into the peer's. See :meth:`plan` and :meth:`Link.post` for errors.

        Where there is nothing to move the transfer completes all the same, and the peer is told.
        """
        copy = self.plan(Op.PUT, local_blocks, remote_blocks, tokens=tokens, layers=layers)
        return self.link.post(copy, Op.PUT, tuning=tuning, after=after)

    def get(
        self,
        remote_blocks: Blocks,
        local_blocks: Blocks,
        *,
        tokens: range | None = None,
        layers: Collection[int] | None = None,
        tuning: Tuning | None = None,
        after: After = None,
    ) -> Transfer:
        """Read the peer's blocks into local ones. For errors see :meth:`put`."""
        copy = self.plan(Op.GET, local_blocks, remote_blocks, tokens=tokens, layers=layers)
        return self.link.post(copy, Op.GET, tuning=tuning, after=after)

    def close(self) -> None:
        """Unmap the peer's cache and end the connection; may be called more than once.

        Raises:
            TransferTimeout: transfers in flight did not end; nothing was unmapped, and
                closing again waits again.
        """
        if self._closed or os.getpid() != self._pid:
            return  # of a forked child: the connection is its parent's, and open
        self.unmap()
        if self._alloc is not None:
            self._alloc.close()
        if leave(self._alloc_address, self.connection, self._key):
            self.give_back_name()
        else:
            self._give_back.detach()  # what the peer hears later would end the next of that name

    def unmap(self) -> None:
        """Unmap the peer's cache without telling it; may be called more than once.

        Raises:
            TransferTimeout: as for :meth:`close`.
        """
        self.link.close()
        self._closed = True

    def give_back_name(self) -> None:
        """Let another connection have this one's name, once the peer knows that it has ended."""
        self._give_back()

    def _channel(self) -> ControlClient[ReserveReply | Done]:
        if self._closed:
            raise InvalidUsage(f"the connection to {self._alloc_address} is closed; connect again")
        if self._alloc is None:
            self._alloc = ControlClient(
                self._alloc_address,
                (ReserveReply, Done),
                deadline_s=self._deadline_s,
                key=self._key,
            )
        return self._alloc

    def _checked_ids(self, block_ids: list[int], num_blocks: int) -> NDArray[np.int64]:
        ids = np.array(block_ids, dtype=np.int64)
        if ids.size != num_blocks or (ids.size and ids.max() >= self.view.num_blocks):
            raise ProtocolMismatch(
                f"the peer granted {ids.size} blocks up to id {ids.max(initial=-1)}; wanted "
                f"{num_blocks} of a cache of {self.view.num_blocks}"
            )
        return ids


def _remote_view(shard: KVShard, reply: InitReply, link: Link) -> KVView:
    """The peer's cache at the link's addresses, once all of it was found inside its regions."""
    layout = shard.layout
    shape = (layout.num_layers, layout.num_vectors)
    if len(reply.planes) != shape[0] * shape[1]:
        raise ProtocolMismatch(
            f"the peer names {len(reply.planes)} planes; its rank has {shape[0]} layers of "
            f"{shape[1]} vectors"
        )
    addresses = [
        int(link.region_addresses[plane.region]) + plane.offset_bytes for plane in reply.planes
    ]
    try:
        view = KVView(
            shard,
            reply.num_blocks,
            addresses=np.array(addresses, dtype=np.uint64).reshape(shape),
            block_stride_bytes=reply.block_stride_bytes,
            token_stride_bytes=reply.token_stride_bytes,
            head_stride_bytes=reply.head_stride_bytes,
        )
    except InvalidUsage as error:
        raise ProtocolMismatch(f"the peer's cache cannot be: {error}") from error
    for index, plane in enumerate(reply.planes):
        region_bytes = link.region_bytes[plane.region]
        if plane.offset_bytes + view.span_bytes > region_bytes:
            raise ProtocolMismatch(
                f"plane {index} of the peer spans {view.span_bytes} bytes from offset "
                f"{plane.offset_bytes}, but its region has {region_bytes}"
            )
    return view
