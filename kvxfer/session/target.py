"""A rank that a sender delivers to: the connection to it, and its end and return."""

import logging
import math
import time
from collections.abc import Callable, Mapping

import msgspec

from kvxfer.control import (
    AbortRequest,
    Done,
    InitReply,
    ReserveReply,
    ReserveRequest,
    WatchReply,
    WatchRequest,
)
from kvxfer.control.calls import Answer, Calls, Line
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
from kvxfer.session.delivery import Delivery, as_ours
from kvxfer.session.leaving import Leaving, end_of
from kvxfer.session.meeting import init_request, offers_to
from kvxfer.session.peer import Peer
from kvxfer.session.poster import Poster
from kvxfer.session.states import SendEvent
from kvxfer.transport import Op, Transfer, Transports

_log = logging.getLogger(__name__)
_CALL_S = 1.0
_PAUSE_S = 0.05  # between two tries to meet a peer that is not quite there
_LOOK_S = 0.05  # how soon the end of a peer's process is seen


class Target:
    """One rank, by numeric addresses of its channels. All methods are of the sender's thread.

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
        # Two, so that many reservations do not keep commits waiting.
        self._reserves: Line | None = None
        self._watch: Line | None = None
        self._alloc: Line | None = None
        self._users: dict[str, Delivery] = {}
        self._waiting: list[Delivery] = []
        self._owed: dict[str, list[Transfer]] = {}  # aborts that the peer has yet to hear
        self._flying: list[Transfer] = []  # of deliveries that ended before their copies
        self._try_s = self._look_s = 0.0
        self._watch_s = math.inf  # when to watch again

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

    def want(self, delivery: Delivery) -> None:
        """Feed ``delivery`` with CONNECTED as soon as it can be."""
        self._users[delivery.request_id] = delivery
        self._waiting.append(delivery)

    def forget(self, delivery: Delivery) -> None:
        """A delivery has ended."""
        del self._users[delivery.request_id]
        self._flying += delivery.in_flight
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
            self._guard(lambda: self._abort_owed(request_id))

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
        self._guard(lambda: self._go_on(now_s))

    def close(self) -> None:
        """Leave the peer; not one to which copies may still be in flight."""
        alloc, self._alloc = self._alloc, None  # to leave by: another might not be had
        self._close_lines()
        self._end_init()
        if self._peer is not None and not self._has_copies():
            self._leave_peer(alloc)
        elif alloc is not None:
            self._calls.drop(alloc)

    def abandon(self) -> None:
        """Post nothing any more, though copies may be in flight."""
        if self._poster is not None:
            self._poster.close()
            self._poster = None

    def _guard(self, call: Callable[[], object]) -> None:
        """Have an exception lose this peer, and not the thread that serves the others too.

        It may pass, as a want of descriptors does: the peer is met anew while that is wanted.
        """
        try:
            call()
        except Exception as error:
            self.last_error = as_ours(error, f"the connection to {self.address}")
            self._end_init()
            self._try_s = time.monotonic() + _PAUSE_S
            self.lose(self.last_error)

    def _guarded(self, on_answer: Callable[[Answer], None]) -> Callable[[Answer], None]:
        return lambda answer: self._guard(lambda: on_answer(answer))

    def _go_on(self, now_s: float) -> None:
        if self._peer is not None and not self.is_lost and now_s >= self._look_s + _LOOK_S:
            self._look_s = now_s
            end = end_of(self._peer)
            if end is not None:
                self.lose(end)
        if self._watch is not None and now_s >= self._watch_s:
            self._watch_news()
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

    # Meeting.

    def _ask_init(self) -> None:
        self._init = self._calls.open(self._addresses["init"], InitReply)
        name = self._names.propose(self.address)
        request = init_request(self._cache, self._offers.names, name, self._convert)
        met = self._guarded(lambda answer: self._met(name, answer))
        self._init.start(request, deadline_s=_CALL_S, on_answer=met)

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
        except Exception as error:
            # The peer is not told, so that the next to ask for it may have the name, and its slot.
            self._names.give_back(answer.incarnation, name)
            self._not_mapped(answer.transport, error)
            return
        self.last_error = None
        self._poster = Poster(self._peer.link, self._calls.wake)
        self._open_lines()
        self._connected()

    def _not_mapped(self, transport: str, error: Exception) -> None:
        if isinstance(error, PeerLost):
            self.last_error = error
        elif isinstance(error, NotAvailable):
            self._offer_less(transport, error)
        else:
            self._refuse(error if isinstance(error, KvxferError) else PeerLost(str(error)))

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
        self._watch = self._calls.open(self._addresses["alloc"], WatchReply)
        self._watch_news()
        for line in (self._alloc, self._reserves, self._watch):
            line.on_lost = lambda: self.lose(
                PeerLost(f"{self._addresses['alloc']} ended the connection; is the peer alive?")
            )

    def _close_lines(self) -> None:
        for line in (self._alloc, self._reserves, self._watch):
            if line is not None:
                self._calls.drop(line)
        self._alloc = self._reserves = self._watch = None

    def _watch_news(self) -> None:
        """Hear of requests that the peer gives up while they are written."""
        assert self._watch is not None
        self._watch_s = math.inf
        request = WatchRequest(self.peer.connection)
        heard = self._guarded(self._heard)
        self._watch.start(request, deadline_s=self._silent_s, on_answer=heard)

    def _heard(self, answer: Answer) -> None:
        if isinstance(answer, WatchReply):
            for request_id in answer.decided:
                if request_id in self._users:
                    self._users[request_id].ask_again()
            for request_id, reason in answer.failures:
                delivery = self._users.get(request_id)
                if delivery is not None:
                    text = f"request {request_id!r} has failed at the receiver: {reason}"
                    delivery.feed(SendEvent.ERROR, TransferFailed(text))
        elif isinstance(answer, PeerLost | RegistrationError | ControlTimeout):
            self.lose(answer)
        else:  # refused, as where too much is owed to others: not at once again
            self._watch_s = time.monotonic() + _CALL_S
            return
        if self._watch is not None:
            self._watch_news()

    def _end_init(self) -> None:
        if self._init is not None:
            self._calls.drop(self._init)
            self._init = None

    # Leaving.

    def _has_copies(self) -> bool:
        for transfers in (self._flying, *self._owed.values()):
            transfers[:] = [one for one in transfers if not _has_ended(one)]
        return (
            bool(self._flying)
            or any(self._owed.values())
            or any(one.in_flight for one in self._users.values())
        )

    def _leave_peer(self, line: Line | None = None) -> None:
        """Unmap the peer, and tell it so: it may live, and keep its pages until it knows."""
        # First: without one it would never know, so `step` tries again.
        line = line or self._calls.open(self._addresses["alloc"], Done)
        peer = self.peer
        self.abandon()
        try:
            peer.unmap()
        except BaseException:
            self._calls.drop(line)  # what is mapped may be written to: it must not hear otherwise
            raise
        self._peer = None
        self.is_lost = False
        self._owed.clear()
        self._try_s = 0.0
        Leaving(self._calls, line, peer)

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
        self.call(request, _CALL_S, self._guarded(take))


def _has_ended(transfer: Transfer) -> bool:
    try:
        return transfer.poll(0.0)
    except KvxferError:
        return True
