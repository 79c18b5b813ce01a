"""The prefill side: requests that are written into the caches of receivers."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from kvxfer.closing import Closing
from kvxfer.control import SharedKey
from kvxfer.control.calls import Calls
from kvxfer.control.guard import guarded_host
from kvxfer.errors import InvalidUsage, NotAvailable, TransferFailed
from kvxfer.layout import Blocks, BlockTable, BlockTables, ToFp8
from kvxfer.memory import KVCache, MemoryKind
from kvxfer.session.connections import ConnectionNames
from kvxfer.session.delivery import Delivery, as_ours
from kvxfer.session.endpoint import new_incarnation
from kvxfer.session.meeting import require_scales
from kvxfer.session.orders import Addresses, looked_up, require_request_id
from kvxfer.session.parts import Parts
from kvxfer.session.send_handle import LayerHandle, SendHandle
from kvxfer.session.shipment import Shipment
from kvxfer.session.states import SendLimits
from kvxfer.session.target import Target
from kvxfer.transport import After, Board, Transports, Tuning

_log = logging.getLogger(__name__)
_IDLE_S = 3600.0
# How soon a copy that a GPU runs is seen to have ended; the copy itself goes on meanwhile.
_COPY_POLL_S = 0.0002
_CLOSE_S = 2.0


class Sender(Closing):
    """Sends requests to receivers, and reaches those that come back by itself. A context manager.

    One background thread does all of it, beside one a peer that copies where a link's ``post``
    does. A peer that is dead, hangs or refuses fails the requests
    to it, within the limits, and no others. Thread-safe.

    Attributes:
        incarnation: what receivers know this sender by; differs at every start.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        transport: str = "auto",
        num_threads: int | None = None,
        convert: ToFp8 | None = None,
        bind_host: str = "127.0.0.1",
        key: SharedKey | None = None,
        insecure: bool = False,
        strict: bool = False,
        limits: SendLimits | None = None,
    ) -> None:
        """Send from ``cache``; nothing is connected yet.

        Args:
            cache: what is read.
            transport: a name of :func:`kvxfer.available_transports`, or ``auto``.
            num_threads: threads of host copies; None = the measured best.
            convert: see :meth:`Endpoint.connect`.
            bind_host: of a transport that listens on this side too: the address of the network
                that joins it to the receivers. The others open no port here.
            key: the key of the receivers' channels, where they have one.
            insecure: bind beyond loopback without a key.
            strict: see :class:`Endpoint`.
            limits: how long to wait for what.

        Raises:
            InvalidUsage: an unusable ``bind_host``, or one beyond loopback with neither ``key`` nor
                ``insecure``.
            NotAvailable: the transport does not work here, and why.
            RegistrationError: the cache was closed, or its memory was freed.
        """
        cache.require_live()
        require_scales(cache, convert)
        host = guarded_host(bind_host, None, key, insecure)
        kind = MemoryKind.HOST if cache.device < 0 else MemoryKind.DEVICE
        self.incarnation = new_incarnation()
        self._cache = cache
        self._convert = convert
        self._limits = limits or SendLimits()
        self._transports = Transports(
            transport,
            memory=kind,
            board=Board(),  # no peer completes here
            bind_host=host,
            num_threads=num_threads,
            strict=strict,
        )
        self._names = ConnectionNames(self.incarnation)
        self._calls = Calls(key)
        self._targets: dict[tuple[str, str], Target] = {}
        self._deliveries: list[Delivery] = []
        self._handed_in: deque[tuple[Shipment, Sequence[Addresses]]] = deque()
        self._open: dict[str, Shipment] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvxfer-sender", daemon=True)
        self._thread.start()

    def begin(
        self,
        request_id: str,
        *,
        to: Addresses | Sequence[Addresses],
        tokens: range,
        tuning: Tuning | None = None,
    ) -> SendHandle:
        """Begin a request whose parts are sent as they become ready: blocks are reserved at once.

        Each :meth:`SendHandle.push` sends some tokens of some layers, and after
        :meth:`SendHandle.finish` the request is committed.

        Args:
            request_id: its name of 1 to 256 characters, which the receiver must not have met
                before. The ranks of this side that share a request send it under one name.
            to: ``addresses`` of the receiver, or of each of its ranks. A name is looked up in this
                call, which waits for the resolver; numeric ones cost nothing.
            tokens: which tokens of the request are sent, a range of step 1.
            tuning: how to run the copies.

        Returns:
            What takes the parts, and what to wait for.

        Raises:
            InvalidUsage: a wrong name, wrong addresses or tokens, a request of that name is on its
                way, or this is closed.
            NotAvailable: a host has no address, or as many requests are on their way as may be;
                wait for some.
        """
        shipment, ranks = self._shipment(request_id, to, tokens, tuning)
        self._hand_in(shipment, ranks)
        return SendHandle(shipment, self._cache.device)

    def send(
        self,
        request_id: str,
        blocks: Blocks,
        *,
        to: Addresses | Sequence[Addresses],
        tokens: range | None = None,
        tuning: Tuning | None = None,
        after: After = None,
    ) -> SendHandle:
        """Write a request's blocks to every rank of a receiver: reserve, transfer, commit.

        Args:
            request_id: see :meth:`begin`, as are ``to`` and ``tuning``.
            blocks: see :meth:`SendHandle.push`, as is ``after``.
            to: where to.
            tokens: which tokens of the request; None = all slots of the blocks.
            tuning: how to run the copies.
            after: what is reached before the blocks are read.

        Returns:
            What to wait for. The source blocks stay as they are until then.

        Raises:
            InvalidUsage: as for :meth:`begin`, or the blocks do not hold the tokens.
            NotAvailable: as for :meth:`begin`.
        """
        table, wanted = self._table(blocks, tokens)
        shipment, ranks = self._shipment(request_id, to, wanted, tuning)
        handle = SendHandle(shipment, self._cache.device)
        handle.push(table, after=after)
        handle.finish()
        self._hand_in(shipment, ranks)
        return handle

    def send_layers(
        self,
        request_id: str,
        blocks: Blocks,
        *,
        to: Addresses | Sequence[Addresses],
        tokens: range | None = None,
        tuning: Tuning | None = None,
    ) -> LayerHandle:
        """Begin a request whose layers are sent as they become ready; see :meth:`send`.

        Blocks are reserved at once. Each :meth:`LayerHandle.layer` sends one layer; after the last
        of this rank the request is committed.
        """
        table, wanted = self._table(blocks, tokens)
        shipment, ranks = self._shipment(request_id, to, wanted, tuning)
        self._hand_in(shipment, ranks)
        return LayerHandle(shipment, self._cache.device, table, self._cache.shard.layers)

    @property
    def num_open(self) -> int:
        """Requests that are on their way."""
        with self._lock:
            return sum(not one.done for one in self._open.values())

    def close(self) -> None:
        """Cancel what is on its way, leave all peers and end the thread; bounded, and repeatable.

        Requests that cannot end in time fail, and their error says that their blocks may still be
        read.
        """
        with self._lock:
            self._closing = True
        self._calls.wake()
        if threading.current_thread() is not self._thread:
            limits = self._limits
            self._thread.join(limits.drain_s + limits.abort_s + _CLOSE_S)

    def _table(
        self, blocks: Blocks, tokens: range | None
    ) -> tuple[BlockTable | BlockTables, range]:
        """The tables of ``blocks``, and the tokens to send."""
        if isinstance(blocks, BlockTables):
            if tokens is None:
                raise InvalidUsage("tables of groups of layers do not say which tokens; pass them")
            return blocks, tokens
        table = blocks if isinstance(blocks, BlockTable) else BlockTable(blocks)
        return table, table.tokens(self._cache.layout.block_size) if tokens is None else tokens

    def _shipment(
        self,
        request_id: str,
        to: Addresses | Sequence[Addresses],
        tokens: range,
        tuning: Tuning | None,
    ) -> tuple[Shipment, Sequence[Addresses]]:
        self._cache.require_live()
        require_request_id(request_id)
        ranks = looked_up(to)
        shipment = Shipment(
            request_id,
            Parts(request_id, self._cache.shard, tokens),
            num_ranks=len(ranks),
            tuning=tuning,
            tell=self._calls.wake,
        )
        return shipment, ranks

    def _hand_in(self, shipment: Shipment, ranks: Sequence[Addresses]) -> None:
        """Have the thread take up a request."""
        limit = self._limits.num_requests
        with self._lock:
            if self._closing:
                raise InvalidUsage("this sender is closed; make another")
            earlier = self._open.get(shipment.request_id)
            if earlier is not None and not earlier.done:
                raise InvalidUsage(f"request {shipment.request_id!r} is on its way; use a new id")
            if len(self._open) >= limit and all(not one.done for one in self._open.values()):
                raise NotAvailable(f"{limit} requests are on their way; wait for some of them")
            self._open[shipment.request_id] = shipment
            self._handed_in.append((shipment, ranks))
        self._calls.wake()

    # The thread.

    def _run(self) -> None:
        reason = "the sender closes"
        try:
            while not self._closing:
                self._turn()
        except Exception as error:  # of no delivery and no target: those fail by themselves
            _log.exception("the sender's thread ends; nothing is sent any more")
            reason = f"the sender failed: {error!r}"
        with self._lock:
            self._closing = True
        try:
            self._wind_up(reason)
        except Exception:
            _log.exception("the sender's thread ends before its peers have heard so")
        finally:
            for target in self._targets.values():
                target.abandon()
            self._calls.close()
            self._fail_all(TransferFailed(f"{reason}; its blocks may still be read: keep them"))

    def _turn(self, limit_s: float = _IDLE_S) -> None:
        while self._handed_in:
            self._take_up(*self._handed_in.popleft())
        now_s = time.monotonic()
        for delivery in self._deliveries:
            if delivery.is_due(now_s):
                delivery.step(now_s)
        for target in self._targets.values():
            target.step(time.monotonic())
        self._forget_ended()
        must_look = any(delivery.must_look for delivery in self._deliveries)
        ends_s = [delivery.next_s for delivery in self._deliveries]
        ends_s += [target.next_s for target in self._targets.values()]
        due_s = min(ends_s, default=float("inf"))
        left_s = max(0.0, due_s - time.monotonic())
        self._calls.run(min(left_s, limit_s, _COPY_POLL_S if must_look else _IDLE_S))

    def _take_up(self, shipment: Shipment, ranks: Sequence[Addresses]) -> None:
        for one in ranks:
            try:
                target = self._target_at(one)
                if target.busy_with(shipment.request_id):
                    raise InvalidUsage(
                        f"an earlier request {shipment.request_id!r} has not ended over there; use "
                        "a new id"
                    )
                self._deliveries.append(Delivery(shipment, target, self._limits))
            except Exception as error:
                shipment.end_rank(0, as_ours(error, f"request {shipment.request_id!r}"))

    def _target_at(self, addresses: Addresses) -> Target:
        key = (addresses["init"], addresses["alloc"])
        target = self._targets.get(key)
        if target is None:
            target = self._targets[key] = Target(
                self._cache,
                self._transports,
                self._calls,
                self._names,
                addresses,
                self._convert,
                self._limits.silent_s,
            )
        return target

    def _forget_ended(self) -> None:
        self._deliveries = [one for one in self._deliveries if not one.is_terminal]
        for key in [key for key, target in self._targets.items() if target.is_idle]:
            del self._targets[key]
        with self._lock:
            for request_id in [name for name, one in self._open.items() if one.done]:
                del self._open[request_id]

    def _wind_up(self, reason: str) -> None:
        with self._lock:
            shipments = list(self._open.values())
        for shipment in shipments:
            shipment.give_up(f"request {shipment.request_id!r} was cancelled: {reason}")
        end_s = time.monotonic() + self._limits.drain_s + self._limits.abort_s
        while (self._deliveries or self._handed_in) and time.monotonic() < end_s:
            self._turn(0.05)
        if self._deliveries:
            return
        for target in self._targets.values():
            self._close_target(target)
        end_s = time.monotonic() + _CLOSE_S / 4
        while self._calls.num_lines and time.monotonic() < end_s:
            self._calls.run(0.05)

    def _close_target(self, target: Target) -> None:
        try:
            target.close()
        except Exception:
            _log.exception("%s has not heard that its sender leaves", target.address)

    def _fail_all(self, error: TransferFailed) -> None:
        with self._lock:
            shipments, self._open = list(self._open.values()), {}
        for shipment in shipments:
            shipment.end_all(error)
