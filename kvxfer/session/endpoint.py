"""A cache that peers can reach."""

import itertools
import threading
import time
import uuid
from collections.abc import Mapping

from kvxfer.closing import Closing
from kvxfer.control import (
    AbortRequest,
    CommitRequest,
    ControlServer,
    Done,
    InitReply,
    InitRequest,
    LeaveRequest,
    PlaneSpec,
    ReserveReply,
    ReserveRequest,
)
from kvxfer.errors import InvalidUsage, NotAvailable, RegistrationError
from kvxfer.memory import KVCache, MemoryKind
from kvxfer.session.block_pool import BlockPool
from kvxfer.session.connections import ConnectionNames
from kvxfer.session.layouts import layout_spec, require_equal_layouts
from kvxfer.session.peer import Peer
from kvxfer.transport import Board, Export, create_transport

_RETRY_AFTER_S = 0.01
# From the clock, so that a restarted worker does not take up its predecessor's epochs.
_EPOCHS = itertools.count(time.time_ns())


class Endpoint(Closing):
    """One rank's cache on the control plane: it answers peers, and connects to them.

    A prefill worker and a decode worker are both endpoints; whoever holds a :class:`Peer` may put
    to it or get from it. A context manager.

    Attributes:
        cache: the registered cache.
        incarnation: differs at every start, so that a peer never takes a successor for us.
        addresses: URLs of the ``init`` and ``alloc`` channels, for :meth:`connect` elsewhere.
        blocks: the block pool that the alloc channel serves. A request that a peer has committed
            keeps its blocks until ``blocks.release`` is called here.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        transport: str = "auto",
        num_threads: int | None = None,
        bind_host: str = "127.0.0.1",
        ports: Mapping[str, int] | None = None,
    ) -> None:
        """Export ``cache`` over ``transport`` and serve its channels.

        Args:
            cache: what peers may reach.
            transport: a name of :func:`kvxfer.available_transports`, or ``auto``.
            num_threads: threads of host copies; None = all CPUs, at most 8.
            bind_host: address of both channels.
            ports: port of ``init`` and of ``alloc``; absent takes a free one.

        Raises:
            NotAvailable: the transport does not work here, and why.
            RegistrationError: the cache's memory cannot be exported.
        """
        cache.require_live()
        kind = MemoryKind.HOST if cache.device < 0 else MemoryKind.DEVICE
        self.cache = cache
        self.incarnation = uuid.uuid4().hex
        self.blocks = BlockPool(cache.num_blocks)
        self._names = ConnectionNames(self.incarnation)
        self._transport = create_transport(transport, memory=kind, num_threads=num_threads)
        self._epoch = next(_EPOCHS)
        self._slots: dict[str, int] = {}  # by connection
        self._idle: dict[str, None] = {}  # connections that left, oldest first
        self._lock = threading.Lock()
        self._board = Board()
        self._exports: list[Export] = []
        self._forget = cache.on_close(self._board.withdraw)
        try:
            for item in cache.registrations:
                self._exports.append(self._transport.export(item))
            self._server = ControlServer(
                {
                    "init": {InitRequest: self._init},
                    "alloc": {
                        ReserveRequest: self._reserve,
                        CommitRequest: self._commit,
                        AbortRequest: self._abort,
                        LeaveRequest: self._leave,
                    },
                },
                bind_host=bind_host,
                ports=ports,
            )
        except BaseException:
            self._withdraw()
            raise
        self.addresses = dict(self._server.addresses)

    @property
    def transport_name(self) -> str:
        """The transport in use."""
        return self._transport.name

    def connect(self, addresses: Mapping[str, str], *, deadline_s: float = 10.0) -> Peer:
        """Meet the endpoint at ``addresses`` and map its cache.

        Transfers are numbered a connection (:attr:`Peer.connection`). A connection that follows a
        closed one to the same endpoint has its name and counts on.

        Raises:
            ControlTimeout: no answer within ``deadline_s``.
            LayoutMismatch: the two caches cannot be joined; names the field and both values.
            NotAvailable: the peer cannot be reached over this transport, and why.
        """
        return Peer(
            self.cache,
            self._transport,
            names=self._names,
            addresses=addresses,
            deadline_s=deadline_s,
        )

    def wait(self, connection: str, sequence: int, *, timeout_s: float) -> bool:
        """Wait until a peer has completed its transfer number ``sequence``.

        True means that the bytes are visible here.

        Args:
            connection: the other side's :attr:`Peer.connection`; of its only connection to here
                that is its incarnation.
            sequence: :attr:`Transfer.sequence`; the transfers of a connection are numbered from 1.
            timeout_s: how long to wait.

        Raises:
            InvalidUsage: no peer of that name has connected.
        """
        slot = self._slots.get(connection)
        if slot is None:
            raise InvalidUsage(
                f"no peer of incarnation {connection!r} has connected; wait once it has"
            )
        return self._board.wait(slot, sequence, timeout_s=timeout_s)

    def close(self) -> None:
        """Stop serving and withdraw the cache; may be called more than once."""
        self._board.withdraw()
        self._server.close()
        self._withdraw()

    def _withdraw(self) -> None:
        self._forget()
        self._board.withdraw()
        for export in self._exports:
            export.close()

    def _init(self, request: InitRequest) -> InitReply:
        require_equal_layouts(request.layout, layout_spec(self.cache.layout))
        if self._transport.name not in request.transports:
            raise NotAvailable(
                f"this endpoint serves {self._transport.name}; the peer offers "
                f"{', '.join(request.transports) or 'nothing'}"
            )
        self.cache.require_live()
        slot = self._slot_of(request.incarnation)
        view = self.cache.view
        return InitReply(
            incarnation=self.incarnation,
            epoch=self._epoch,
            transport=self._transport.name,
            layout=layout_spec(self.cache.layout),
            num_blocks=view.num_blocks,
            block_stride_bytes=view.block_stride_bytes,
            planes=[PlaneSpec(region, offset) for region, offset in self.cache.planes],
            regions=[export.metadata for export in self._exports],
            board=self._board.describe(slot),
        )

    def _reserve(self, request: ReserveRequest) -> ReserveReply:
        if request.epoch != self._epoch:
            raise RegistrationError(
                f"epoch {request.epoch} of this cache is over, it is now {self._epoch}; connect "
                "again"
            )
        self.cache.require_live()
        block_ids = self.blocks.reserve(request.incarnation, request.request_id, request.num_blocks)
        if block_ids is None:
            return ReserveReply(
                request_id=request.request_id, state="wait", retry_after_s=_RETRY_AFTER_S
            )
        return ReserveReply(request_id=request.request_id, state="granted", block_ids=block_ids)

    def _commit(self, request: CommitRequest) -> Done:
        self.blocks.commit(request.incarnation, request.request_id)
        return Done(request.request_id)

    def _abort(self, request: AbortRequest) -> Done:
        self.blocks.abort(request.incarnation, request.request_id)
        return Done(request.request_id)

    def _leave(self, request: LeaveRequest) -> Done:
        with self._lock:
            if request.incarnation in self._slots:
                self._idle[request.incarnation] = None
        return Done(request.incarnation)

    def _slot_of(self, connection: str) -> int:
        """The peer's slot, kept when it leaves, so that it counts on when it comes back.

        Only when no slot is left does the peer that left first lose its own.
        """
        with self._lock:
            self._idle.pop(connection, None)
            if connection not in self._slots:
                if not self._board.has_free_slot and self._idle:
                    oldest = next(iter(self._idle))
                    del self._idle[oldest]
                    freed = self._slots.pop(oldest, None)
                    if freed is not None:
                        self._board.give_back(freed)
                slot = self._board.take_slot()
                # It may have been that of a peer which died without leaving.
                self._slots = {name: one for name, one in self._slots.items() if one != slot}
                self._idle = {name: None for name in self._idle if name in self._slots}
                self._slots[connection] = slot
            return self._slots[connection]
