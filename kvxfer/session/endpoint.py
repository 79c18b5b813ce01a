"""A cache that peers can reach."""

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeAlias

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
    Ports,
    ReserveReply,
    ReserveRequest,
    SharedKey,
    WatchRequest,
)
from kvxfer.control.guard import guarded_host
from kvxfer.errors import InvalidUsage, PeerLost, RegistrationError
from kvxfer.layout import KVShard, Share, ToFp8, shares
from kvxfer.memory import KVCache, MemoryKind
from kvxfer.session.block_pool import BlockPool
from kvxfer.session.connections import ConnectionNames
from kvxfer.session.exports import Exports
from kvxfer.session.layouts import layout_spec, rank_spec, require_joinable, shard_of
from kvxfer.session.peer import Peer
from kvxfer.session.peer_group import PeerGroup
from kvxfer.session.requests import PoolRequests, Requests, Writers
from kvxfer.transport import Board, Transport, Transports
from kvxfer.transport.process import ProcessWatch

# From the clock, so that a restarted worker does not take up its predecessor's epochs.
_EPOCHS = itertools.count(time.time_ns())

ChannelPorts: TypeAlias = Ports | Mapping[str, int | Sequence[int]]
"""Ports of all ranks, of which a rank takes its own; or those of one endpoint by channel."""


def new_incarnation() -> str:
    """A name that no other start of a worker has."""
    return uuid.uuid4().hex


class Endpoint(Closing):
    """One rank's cache on the control plane: it answers peers, and connects to them.

    A prefill worker and a decode worker are both endpoints; whoever holds a :class:`Peer` may put
    to it or get from it. A context manager.

    Attributes:
        cache: the registered cache.
        incarnation: differs at every start, so that a peer never takes a successor for us.
        addresses: URLs of the ``init`` and ``alloc`` channels, for :meth:`connect` elsewhere.
        blocks: the block pool that the alloc channel serves, where no ``requests`` do. A request
            that a peer has committed keeps its blocks until ``blocks.release`` is called here.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        transport: str | Transport = "auto",
        num_threads: int | None = None,
        bind_host: str = "127.0.0.1",
        ports: ChannelPorts | None = None,
        advertise_host: str | None = None,
        key: SharedKey | None = None,
        insecure: bool = False,
        strict: bool = False,
        requests: Callable[[Writers], Requests] | None = None,
    ) -> None:
        """Export ``cache`` over ``transport`` and serve its channels.

        Args:
            cache: what peers may reach.
            transport: a name of :func:`kvxfer.available_transports`, a transport of this endpoint
                alone with settings of its own, or ``auto``: the fastest that reaches each peer.
            num_threads: threads of host copies; None = the measured best.
            bind_host: address of both channels, and of a transport that listens. It guards the
                channels alone: what UCX listens on trusts whoever reaches it.
            ports: port of ``init`` and of ``alloc``, or several of one, which are aliases; absent
                takes a free one. `kvxfer.control.Ports` has those of all ranks.
            advertise_host: see `ControlServer`, as are ``key`` and ``insecure``.
            key: admits its holders alone; connections from here use it too.
            insecure: bind beyond loopback without a key.
            strict: where ``auto`` takes a slower path than the peer's place allows, or NVLink is
                asked for and PCIe carries the bytes, raise instead of warning.
            requests: makes what answers the alloc channel; None = the pool ``blocks``.

        Raises:
            InvalidUsage: unusable hosts or ports, or ``bind_host`` is beyond loopback and there is
                neither ``key`` nor ``insecure``.
            NotAvailable: the transport does not work here, a port is in use, and why.
            RegistrationError: the cache's memory cannot be exported.
        """
        cache.require_live()
        host = guarded_host(bind_host, advertise_host, key, insecure)
        kind = MemoryKind.HOST if cache.device < 0 else MemoryKind.DEVICE
        self.cache = cache
        self.incarnation = new_incarnation()
        self.blocks = BlockPool(cache.num_blocks)
        self._requests = PoolRequests(self, self.blocks) if requests is None else requests(self)
        self._key = key
        self._names = ConnectionNames(self.incarnation)
        self._epoch = next(_EPOCHS)
        self._slots: dict[str, int] = {}  # by connection
        self._idle: dict[str, None] = {}  # connections that left, oldest first
        self._shards: dict[str, KVShard] = {}  # by connection, as are the processes
        self._watches: dict[str, ProcessWatch] = {}
        self._lock = threading.Lock()
        self._board = Board()
        self._transports = Transports(
            transport,
            memory=kind,
            board=self._board,
            bind_host=host,
            num_threads=num_threads,
            strict=strict,
        )
        self._exports = Exports(cache, self._transports)
        self._forget = cache.on_close(self._board.withdraw)
        try:
            self._server = ControlServer(
                {
                    "init": {InitRequest: self._init},
                    "alloc": {
                        ReserveRequest: self._reserve,
                        CommitRequest: self._commit,
                        AbortRequest: self._abort,
                        WatchRequest: lambda request: self._requests.watch(request.incarnation),
                        LeaveRequest: self._leave,
                    },
                },
                bind_host=bind_host,
                ports=ports.of_rank(cache.shard.rank) if isinstance(ports, Ports) else ports,
                advertise_host=advertise_host,
                key=key,
                insecure=insecure,
                on_gone=self._gone,
                on_time=self._requests.tick,
            )
        except BaseException:
            self._withdraw()
            raise
        self.addresses = dict(self._server.addresses)

    @property
    def aliases(self) -> Mapping[str, tuple[str, ...]]:
        """For each channel all its URLs, in the order of its ports."""
        return self._server.aliases

    @property
    def transport_name(self) -> str:
        """The transport in use; with ``auto`` the fastest, beside which peers may choose others."""
        return self._transports.first.name

    def connect(
        self,
        addresses: Mapping[str, str],
        *,
        convert: ToFp8 | None = None,
        deadline_s: float = 10.0,
    ) -> Peer:
        """Meet the endpoint at ``addresses`` and map its cache.

        The two caches may be other ranks of other parallel layouts of one model, with other block
        sizes and orders of axes. Transfers are numbered a connection (:attr:`Peer.connection`). A
        connection that follows a closed one to the same endpoint has its name and counts on,
        unless that endpoint did not hear within half a second that it was closed.

        Args:
            addresses: :attr:`addresses` of the other endpoint.
            convert: turn bfloat16 or float16 into fp8 on the way, in the direction whose dtypes
                fit; the other is then refused. None = the dtypes are equal.
            deadline_s: how long to wait for an answer.

        Raises:
            ControlTimeout: no answer within ``deadline_s``.
            InvalidUsage: the conversion's scales have another shape than the model.
            LayoutMismatch: the two caches cannot be joined; names the field and both values.
            NotAvailable: the peer cannot be reached over this transport, and why.
        """
        return Peer.meet(
            self.cache,
            self._transports,
            names=self._names,
            addresses=addresses,
            convert=convert,
            key=self._key,
            deadline_s=deadline_s,
        )

    def connect_all(
        self,
        addresses: Iterable[Mapping[str, str]],
        *,
        convert: ToFp8 | None = None,
        deadline_s: float = 10.0,
    ) -> PeerGroup:
        """Meet all ranks of the other side; of a failure none stays connected.

        Args:
            addresses: :attr:`addresses` of each rank.
            convert: see :meth:`connect`.
            deadline_s: how long to wait for each answer.

        Raises:
            KvxferError: what :meth:`connect` raises.
        """
        with ExitStack() as opened:
            peers = [
                opened.enter_context(self.connect(one, convert=convert, deadline_s=deadline_s))
                for one in addresses
            ]
            opened.pop_all()
        return PeerGroup(peers)

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

    def shares_of(self, connection: str) -> tuple[Share, ...]:
        """The layers and heads that the rank behind a connection sends to this one.

        Raises:
            PeerLost: no such connection; the peer has met another incarnation of this endpoint.
        """
        shard = self._shards.get(connection)
        if shard is None:
            raise PeerLost(
                f"connection {connection!r} is not known to {self.incarnation}; connect again"
            )
        return shares(shard, self.cache.shard)

    def has_completed(self, connection: str, sequence: int) -> bool:
        """Whether the bytes of a connection's transfer are visible here; 0 always are."""
        if sequence == 0:
            return True
        slot = self._slots.get(connection)
        if slot is None or not self._board.wait(slot, sequence, timeout_s=0.0):
            return False
        # Meanwhile the slot may have become another connection's, whose number was read then.
        return self._slots.get(connection) == slot

    def has_ended(self, connection: str) -> bool:
        """Whether no store of a connection can come any more: see `Writers.has_ended`."""
        with self._lock:
            slot = self._slots.get(connection)
            if slot is None or connection in self._idle:
                return True  # it left, or its slot went to another since it had died
            if self._board.has_parted(slot):
                self._end_watch(connection)
                return True
            watch = self._watches.get(connection)
            if watch is None:
                identity = self._board.identity_of(slot)
                if identity is None:
                    return False
                watch = self._watches[connection] = ProcessWatch(identity)
            ended = watch.has_ended
            if ended:
                self._end_watch(connection)
            return ended

    def close(self) -> None:
        """Stop serving and withdraw the cache; may be called more than once."""
        self._board.withdraw()
        self._server.close()
        self._withdraw()

    def _withdraw(self) -> None:
        while self._watches:
            self._watches.popitem()[1].close()
        self._forget()
        self._board.withdraw()
        self._exports.close()

    def _init(self, request: InitRequest) -> InitReply:
        theirs, own = shard_of(request.layout, request.rank), self.cache.shard
        require_joinable(theirs.model, own.model, ToFp8() if request.converts else None)
        self.cache.require_live()
        transport, regions = self._exports.choose(request.transports)
        if request.incarnation in self._shards:
            # A name is used again once what had it is unmapped.
            self._requests.left(request.incarnation)
        slot = self._slot_of(request.incarnation)
        self._shards[request.incarnation] = theirs
        view = self.cache.view
        return InitReply(
            incarnation=self.incarnation,
            epoch=self._epoch,
            transport=transport,
            layout=layout_spec(own.model),
            rank=rank_spec(own.rank),
            num_blocks=view.num_blocks,
            block_stride_bytes=view.block_stride_bytes,
            token_stride_bytes=view.token_stride_bytes,
            head_stride_bytes=view.head_stride_bytes,
            planes=[PlaneSpec(region, offset) for region, offset in self.cache.planes],
            regions=regions,
            board=self._board.describe(slot),
        )

    def _reserve(self, request: ReserveRequest) -> ReserveReply:
        if request.epoch != self._epoch:
            raise RegistrationError(
                f"epoch {request.epoch} of this cache is over, it is now {self._epoch}; connect "
                "again"
            )
        self.cache.require_live()
        return self._requests.reserve(request)

    def _commit(self, request: CommitRequest) -> Done:
        self._requests.commit(request)
        return Done(request.request_id)

    def _abort(self, request: AbortRequest) -> Done:
        self._requests.abort(request)
        return Done(request.request_id)

    def _gone(self, channel: str, connection: str) -> None:
        if channel == "alloc" and connection in self._shards:
            self._requests.gone(connection)

    def _leave(self, request: LeaveRequest) -> Done:
        self._requests.left(request.incarnation)
        with self._lock:
            self._shards.pop(request.incarnation, None)
            self._end_watch(request.incarnation)
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
                for name in set(self._shards) - set(self._slots):
                    del self._shards[name]
                    self._end_watch(name)
                self._slots[connection] = slot
            return self._slots[connection]

    def _end_watch(self, connection: str) -> None:
        watch = self._watches.pop(connection, None)
        if watch is not None:
            watch.close()
