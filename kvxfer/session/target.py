"""A rank that a sender delivers to: the connection to it, and its end and return."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from kvxfer.control import (
    AbortRequest,
    Done,
    FailedRequests,
    InitReply,
    LeaveRequest,
    ReserveReply,
    ReserveRequest,
    WatchRequest,
)
from kvxfer.control.calls import Calls, Line
from kvxfer.errors import (
    ControlTimeout,
    KvxferError,
    NotAvailable,
    PeerLost,
    RegistrationError,
    TransferFailed,
)
from kvxfer.layout import ToFp8
from kvxfer.memory import KVCache
from kvxfer.session.connections import ConnectionNames
from kvxfer.session.meeting import init_request, offers_to
from kvxfer.session.peer import Peer
from kvxfer.session.poster import Poster
from kvxfer.session.states import SendEvent
from kvxfer.transport import Op, Transfer, Transports

if TYPE_CHECKING:
    from kvxfer.session.delivery import Delivery

_log = logging.getLogger(__name__)
_CALL_S = 1.0
_PAUSE_S = 0.05  # between two tries to meet a peer that is not quite there
_LOOK_S = 0.05  # how soon the end of a peer's process is seen
_NUM_LEAVE_CALLS = 600
Answer = msgspec.Struct | KvxferError


class Target:
    """One rank, by the addresses of its channels. All methods are of the sender's thread.

    Attributes:
        address: of its init channel.
        is_lost: the peer that is mapped is gone or cut off; nothing is written to it any more.
        last_error: what the last try to reach it ended with.
    """

    def __init__(
        self,
        cache: KVCache,
        transports: Transports,
        calls: Calls,
        names: ConnectionNames,
        addresses: Mapping[str, str],
        convert: ToFp8 | None,
        silent_s: float,
    ) -> None:
        """Not connected; a delivery that wants to be makes it so."""
        self.address = addresses["init"]
        self.is_lost = False
        self._silent_s = silent_s
        self.last_error: KvxferError | None = None
        self._addresses = dict(addresses)
        self._cache = cache
        self._offers = offers_to(transports, self.address)
        self._calls, self._names, self._convert = calls, names, convert
        self._peer: Peer | None = None
        self._poster: Poster | None = None
        self._init: Line | None = None
        # Two, so that reservations that wait for blocks do not keep commits waiting.
        self._reserves: Line | None = None
        self._watch: Line | None = None
        self._alloc: Line | None = None
        self._users: dict[str, Delivery] = {}
        self._waiting: list[Delivery] = []
        self._owed: dict[str, list[Transfer]] = {}  # aborts that the peer has yet to hear
        self._try_s = self._look_s = 0.0

    @property
    def peer(self) -> Peer:
        """The peer; of a delivery that is connected."""
        assert self._peer is not None
        return self._peer

    @property
    def poster(self) -> Poster:
        """What posts to its link; of a delivery that is connected."""
        assert self._poster is not None
        return self._poster

    @property
    def is_idle(self) -> bool:
        """Whether it may be forgotten: nothing is mapped, on its way or owed."""
        return self._peer is None and not self._users and self._init is None

    @property
    def next_s(self) -> float:
        """When :meth:`step` has something to do at the latest."""
        if self._waiting or self._owed or self.is_lost:
            return time.monotonic() + _PAUSE_S
        return self._look_s + _LOOK_S if self._peer is not None else float("inf")

    def holds(self, peer: Peer | None) -> bool:
        """Whether ``peer`` is the one that is connected."""
        return peer is not None and peer is self._peer and not self.is_lost

    def busy_with(self, request_id: str) -> bool:
        """Whether a request of that name is on its way, or its abort is."""
        return request_id in self._users or request_id in self._owed

    def want(self, delivery: "Delivery") -> None:
        """Feed ``delivery`` with CONNECTED as soon as it can be."""
        self._users[delivery.request_id] = delivery
        self._waiting.append(delivery)

    def forget(self, delivery: "Delivery") -> None:
        """A delivery has ended."""
        del self._users[delivery.request_id]
        if delivery in self._waiting:
            self._waiting.remove(delivery)

    def call(
        self, message: msgspec.Struct, deadline_s: float, on_answer: Callable[[Answer], None]
    ) -> None:
        """Ask the peer on its alloc channel."""
        line = self._reserves if isinstance(message, ReserveRequest) else self._alloc
        assert line is not None, "a call to a peer that is not connected"
        line.start(message, deadline_s=deadline_s, on_answer=on_answer)

    def owe(self, request_id: str, in_flight: list[Transfer]) -> None:
        """Tell the peer of the end of a request once its copies have ended and it answers."""
        if not self.is_lost:
            self._owed[request_id] = in_flight
            self._abort_owed(request_id)

    def lose(self, error: KvxferError) -> None:
        """The peer is gone: nothing is sent to it any more, and it is met anew if need be."""
        if self.is_lost or self._peer is None:
            return
        _log.info("peer %s at %s is lost: %s", self._peer.incarnation, self.address, error)
        self.is_lost = True
        self.last_error = error
        # Whatever waits in them was meant for that peer, not for who answers next.
        self._close_lines()
        for delivery in list(self._users.values()):
            delivery.feed(SendEvent.LOST, error)

    def step(self, now_s: float) -> None:
        """Go on: watch the peer, drop one that is lost, meet one that is wanted."""
        if self._peer is not None and not self.is_lost and now_s >= self._look_s + _LOOK_S:
            self._look_s = now_s
            try:
                self._peer.link.require_open()
            except PeerLost as error:
                self.lose(error)
        for request_id in [name for name, flying in self._owed.items() if flying]:
            self._abort_owed(request_id)
        if self.is_lost and not self._has_copies():
            self._leave_peer()
        if not self._waiting:
            return
        if self._peer is not None and not self.is_lost:
            self._connected()
        elif self._peer is None and self._init is None and now_s >= self._try_s:
            self._ask_init()

    def close(self) -> None:
        """Leave the peer, of which nothing is in flight."""
        self._close_lines()
        self._end_init()
        if self._peer is not None:
            self._leave_peer()

    def abandon(self) -> None:
        """Post nothing any more, though copies may be in flight."""
        if self._poster is not None:
            self._poster.close()
            self._poster = None

    # Meeting.

    def _ask_init(self) -> None:
        self._init = self._calls.open(self._addresses["init"], InitReply)
        name = self._names.propose(self.address)
        request = init_request(self._cache, self._offers.names, name, self._convert)
        self._init.start(
            request, deadline_s=_CALL_S, on_answer=lambda answer: self._met(name, answer)
        )

    def _met(self, name: str, answer: Answer) -> None:
        self._end_init()
        self._try_s = time.monotonic() + _PAUSE_S
        if isinstance(answer, ControlTimeout | PeerLost):
            self.last_error = answer
            return
        if isinstance(answer, KvxferError):
            self._refuse(self._offers.exhausted(answer))
            return
        assert isinstance(answer, InitReply)
        if not self._names.claim(self.address, answer.incarnation, name):
            self._try_s = 0.0  # the name is taken at this incarnation: propose another
            return
        try:
            self._peer = Peer(
                self._cache,
                self._offers,
                names=self._names,
                connection=name,
                reply=answer,
                alloc_address=self._addresses["alloc"],
                convert=self._convert,
            )
        except PeerLost as error:
            self.last_error = error
            return
        except NotAvailable as error:
            self._offer_less(answer.transport, error)
            return
        except Exception as error:
            self._refuse(error if isinstance(error, KvxferError) else PeerLost(str(error)))
            return
        self.last_error = None
        self._poster = Poster(self._peer.link, self._calls.wake)
        self._open_lines()
        self._connected()

    def _offer_less(self, transport: str, error: NotAvailable) -> None:
        """What does not reach the peer is offered no more; the rest is, at once."""
        try:
            self._offers.drop(transport, error)
            self._try_s = 0.0
        except KvxferError as refusal:
            self._refuse(refusal)

    def _refuse(self, error: KvxferError) -> None:
        waiting, self._waiting = self._waiting, []
        for delivery in waiting:
            delivery.feed(SendEvent.ERROR, error)

    def _connected(self) -> None:
        waiting, self._waiting = self._waiting, []
        for delivery in waiting:
            has_share = bool(self.peer.shares(Op.PUT))
            delivery.feed(SendEvent.CONNECTED if has_share else SendEvent.COMMITTED)

    # Lines.

    def _open_lines(self) -> None:
        self._alloc = self._calls.open(self._addresses["alloc"], Done)
        self._reserves = self._calls.open(self._addresses["alloc"], ReserveReply)
        self._watch = self._calls.open(self._addresses["alloc"], FailedRequests)
        self._watch_failures()
        for line in (self._alloc, self._reserves, self._watch):
            line.on_lost = lambda: self.lose(
                PeerLost(f"{self._addresses['alloc']} ended the connection; is the peer alive?")
            )

    def _close_lines(self) -> None:
        for line in (self._alloc, self._reserves, self._watch):
            if line is not None:
                self._calls.drop(line)
        self._alloc = self._reserves = self._watch = None

    def _watch_failures(self) -> None:
        """Hear of requests that the peer gives up while they are written."""
        assert self._watch is not None
        self._watch.start(
            WatchRequest(self.peer.connection), deadline_s=self._silent_s, on_answer=self._heard
        )

    def _heard(self, answer: Answer) -> None:
        if isinstance(answer, FailedRequests):
            for request_id, reason in answer.failures:
                delivery = self._users.get(request_id)
                if delivery is not None:
                    text = f"request {request_id!r} has failed at the receiver: {reason}"
                    delivery.feed(SendEvent.ERROR, TransferFailed(text))
        elif isinstance(answer, PeerLost | RegistrationError | ControlTimeout):
            self.lose(answer)
        if self._watch is not None:
            self._watch_failures()

    def _end_init(self) -> None:
        if self._init is not None:
            self._calls.drop(self._init)
            self._init = None

    # Leaving.

    def _has_copies(self) -> bool:
        for transfers in self._owed.values():
            transfers[:] = [one for one in transfers if not _has_ended(one)]
        return any(self._owed.values()) or any(one.in_flight for one in self._users.values())

    def _leave_peer(self) -> None:
        """Unmap the peer, and tell it so: it may live, and keep its pages until it knows."""
        peer = self.peer
        self._peer = None
        self.is_lost = False
        self._owed.clear()
        self._try_s = 0.0
        self.abandon()
        peer.unmap()
        Leaving(self._calls, self._addresses["alloc"], peer)

    def _abort_owed(self, request_id: str) -> None:
        transfers = self._owed.get(request_id)
        if transfers is None or self.is_lost or self._alloc is None:
            return
        transfers[:] = [one for one in transfers if not _has_ended(one)]
        if transfers:
            return  # `step` looks again

        def take(answer: Answer) -> None:
            if isinstance(answer, ControlTimeout):
                self._abort_owed(request_id)
            elif not isinstance(answer, PeerLost):
                self._owed.pop(request_id, None)

        request = AbortRequest(request_id, self.peer.connection, reason="the sender gave it up")
        self.call(request, _CALL_S, take)


class Leaving:
    """Tells a peer that a connection has unmapped it, until it answers or its process has ended."""

    def __init__(self, calls: Calls, address: str, peer: Peer) -> None:
        """Begin; it keeps itself alive by the call that is open."""
        self._calls = calls
        self._peer = peer
        self._num_left = _NUM_LEAVE_CALLS
        self._line = calls.open(address, Done)
        self._ask()

    def _ask(self) -> None:
        if self._num_left == 0 or not self._peer_stands():
            self._end()
            return
        self._num_left -= 1
        self._line.start(
            LeaveRequest(self._peer.connection), deadline_s=_CALL_S, on_answer=self._take
        )

    def _take(self, answer: Answer) -> None:
        if isinstance(answer, ControlTimeout | PeerLost):
            self._ask()
        else:
            self._end()

    def _end(self) -> None:
        self._calls.drop(self._line)
        # Only now, so that the next connection of that name is not taken for the one that left.
        self._peer.give_back_name()

    def _peer_stands(self) -> bool:
        try:
            self._peer.link.require_open()
        except PeerLost:
            return False
        return True


def _has_ended(transfer: Transfer) -> bool:
    try:
        return transfer.poll(0.0)
    except KvxferError:
        return True
