"""The open requests of a receiver: who may write which blocks, and when that is over."""

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvxfer.control import (
    AbortRequest,
    CommitRequest,
    DeferredReply,
    ReserveReply,
    ReserveRequest,
    WatchReply,
)
from kvxfer.errors import InvalidUsage, TransferFailed
from kvxfer.session.ended import EndedRequests, ended_text
from kvxfer.session.news import News
from kvxfer.session.offers import Granted, Notice, Offer, Refused, ids_of
from kvxfer.session.placement import Placement
from kvxfer.session.reception import Reception, Writer
from kvxfer.session.requests import Writers, not_visible_text, refused, waiting
from kvxfer.session.silence import Silence
from kvxfer.session.states import ReceiveEvent, ReceiveLimits, Receiving

_log = logging.getLogger(__name__)
_RETRY_AFTER_S = 0.05
_NEWS_LOST_S = 10.0  # a watch whose answer is lost ends the connection sooner
_TICK_S = 0.1
_WRITER_ENDED = "its sender's process has ended, or its connection has"


class RequestBook:
    """All requests of one receiver. Thread-safe; calls of the engine are made without the lock."""

    def __init__(
        self,
        writers: Writers,
        placement: Placement,
        *,
        num_pairs: int,
        limits: ReceiveLimits,
        on_notice: Callable[[Notice], None],
        on_free: Callable[[str, tuple[int, ...]], None],
        num_unread: Callable[[], int],
    ) -> None:
        """Empty. For the arguments see `Receiver`; ``num_pairs`` is `Reception.num_pairs`."""
        self._of = writers
        self._placement = placement
        self._num_pairs = num_pairs
        self._limits = limits
        self._on_notice = on_notice
        self._on_free = on_free
        self._num_unread = num_unread
        self._open: OrderedDict[str, Reception] = OrderedDict()  # also those in quarantine
        self._ended = EndedRequests()
        self._news = News()
        self._silence = Silence(limits.silent_s)
        self._look_s = 0.0  # when to look at all that is open
        self._after: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    # What senders ask.

    def reserve(self, request: ReserveRequest) -> ReserveReply:
        """Blocks, ``refused`` with the reason, or ``wait``, of which the news say when it is over.

        No call is held until there are blocks: many requests may wait, and calls are few.
        """
        shares = self._of.shares_of(request.incarnation)
        offer = self._placement.offer_of(request)
        if not shares:
            text = f"the rank behind {request.incarnation!r} has no part of this one's cache"
            return refused(request.request_id, text)
        with self._turn():
            reception = self._open.get(request.request_id)
            if reception is None:
                refusal = self._refusal(offer)
                if refusal is not None:
                    return refusal
                reception = self._begin(offer)
            reason = reception.join(request.incarnation, shares, offer)
            if reason:
                return refused(request.request_id, reason)
        with self._turn():  # a scheduler that answers at once has done so by now
            if reception.state is not Receiving.WAITING:
                return reception.reply()
            heard = self._news.is_heard_by(request.incarnation)
            reception.writers[request.incarnation].waits = heard
            return waiting(request.request_id, _NEWS_LOST_S if heard else _RETRY_AFTER_S)

    def commit(self, request: CommitRequest) -> None:
        """A writer's share is written and visible.

        Raises:
            TransferFailed: the request has failed, and why; nothing of it is taken.
            InvalidUsage: the writer holds no such reservation.
        """
        with self._turn():
            reception = self._open.get(request.request_id)
            writer = reception.writers.get(request.incarnation) if reception else None
            if reception is None or writer is None:
                self._ended.commit(request)
                return
            if reception.state is Receiving.WAITING:
                raise InvalidUsage(
                    f"request {request.request_id!r} holds no blocks yet; reserve them first"
                )
            if not self._of.has_completed(request.incarnation, request.sequence):
                raise TransferFailed(not_visible_text(request))
            writer.over = True
            if reception.state is Receiving.RECEIVING:
                writer.committed = True
                if reception.is_covered:
                    self._feed(reception, ReceiveEvent.COVERED)
                return
            self._settle(reception)
            raise TransferFailed(ended_text(request.request_id, reception.reason))

    def abort(self, request: AbortRequest) -> None:
        """A rank of the request gives it up, and writes to it no more; no rank may begin it again.

        Raises:
            PeerLost: the connection is not known.
        """
        shares = self._of.shares_of(request.incarnation)
        why = f"its sender aborted: {request.reason or 'no reason given'}"
        with self._turn():
            reception = self._open.get(request.request_id)
            if reception is None:
                if shares:
                    self._ended.add_abort(request.request_id, why)
                return
            writer = reception.writers.get(request.incarnation)
            if writer is not None:
                writer.over = True
            elif not shares or reception.has_any(shares):
                return  # it was refused as a stranger to this request, and takes that back
            self._give_up(reception, why)

    def watch(self, connection: str) -> WatchReply | DeferredReply:
        """What became of a sender's requests, once there is something to tell."""
        self._of.shares_of(connection)
        with self._turn():
            self._silence.heard(connection)
            return self._news.watch(connection, time.monotonic())

    def left(self, connection: str) -> None:
        """A sender has unmapped the cache."""
        with self._turn():
            self._silence.forget(connection)
            self._over(connection, "its sender left before it was committed")
            self._news.forget(connection)

    def gone(self, connection: str) -> None:
        """The control connection of a sender has ended; its process may live and write on."""
        with self._turn():
            self._lose(connection, "its sender's connection ended")

    def tick(self, now_s: float) -> float:
        """End what is late, or whose sender's process has ended; returns when to call again."""
        with self._turn():
            if now_s >= self._look_s:  # it is called after each turn of the server's loop
                self._look_s = now_s + _TICK_S
                self._look(now_s)
            if self._open:
                return self._look_s
            return min(self._news.next_s, now_s + 1.0 if self._silence.is_watching else math.inf)

    # What the engine asks.

    def give_up(self, request_id: str, reason: str) -> None:
        """Fail an open request; of any other this changes nothing."""
        with self._turn():
            reception = self._open.get(request_id)
            if reception is not None:
                self._give_up(reception, reason)

    def release(self, request_id: str) -> None:
        """The engine is done with a committed request's blocks."""
        with self._turn():
            if request_id in self._open:
                raise InvalidUsage(
                    f"request {request_id!r} is still written to; abort it, its blocks go back by "
                    "themselves"
                )
            self._placement.free(request_id)
            self._serve_queue()

    def answer(self, request_id: str, answer: Granted | Refused) -> bool:
        """The scheduler's answer; False where the request has ended meanwhile."""
        with self._turn():
            reception = self._open.get(request_id)
            if reception is None or reception.state is not Receiving.WAITING:
                return False
            self._take(reception, answer)
            return True

    def close(self) -> None:
        """Fail what is open; blocks that a sender may still write are in quarantine."""
        with self._turn():
            for reception in list(self._open.values()):
                self._give_up(reception, "the receiver was closed")
                self._feed(reception, ReceiveEvent.LATE)

    @property
    def num_open(self) -> int:
        """Requests that have not ended, or whose blocks are in quarantine."""
        return len(self._open)

    # Inside the lock.

    @contextmanager
    def _turn(self) -> Iterator[None]:
        after: list[Callable[[], object]] = []
        try:
            with self._lock:
                try:
                    yield
                finally:
                    self._news.tell(time.monotonic())
                    after, self._after = self._after, []
        finally:
            for call in after:
                try:
                    call()
                except Exception:
                    # The engine's own fault, on the thread that serves every sender.
                    _log.exception("a callback of the receiver failed")

    def _look(self, now_s: float) -> None:
        for connection in self._silence.take_silent(now_s):
            self._lose(connection, "its sender was silent for too long")
        writing = {
            connection
            for reception in self._open.values()
            for connection, writer in reception.writers.items()
            if not writer.over
        }
        for connection in filter(self._of.has_ended, writing):
            self._end(connection)
        # Last: what is over by now needs no quarantine, also where this side has slept.
        for reception in [one for one in self._open.values() if one.machine.is_late(now_s)]:
            text = f"it was {reception.state.value} for too long"
            reception.reason = reception.reason or text
            self._feed(reception, ReceiveEvent.LATE)

    def _refusal(self, offer: Offer) -> ReserveReply | None:
        """Why a new request is not taken, or not now."""
        request_id = offer.request_id
        text = self._ended.refusal(request_id)
        if text:
            return refused(request_id, text)
        num_blocks = self._placement.num_blocks
        if offer.num_blocks > num_blocks:
            text = f"{offer.num_blocks} blocks of a cache of {num_blocks}: it can never be served"
            return refused(request_id, text)
        if len(self._open) + self._num_unread() >= self._limits.num_requests:
            return waiting(request_id, _RETRY_AFTER_S)
        return None

    def _begin(self, offer: Offer) -> Reception:
        reception = Reception(offer, self._num_pairs, self._limits)
        self._open[offer.request_id] = reception
        self._placement.enqueue(offer)
        self._serve_queue()
        self._after.append(lambda: self._ask(offer))
        return reception

    def _tell_writers(self, reception: Reception) -> None:
        """The request waits no more."""
        for connection, writer in reception.writers.items():
            if writer.waits and not writer.over:  # else nobody hears of it any more
                writer.waits = False
                self._news.add_decision(connection, reception.offer.request_id)

    def _ask(self, offer: Offer) -> None:
        request_id = offer.request_id
        try:
            untaken = self._placement.ask(offer, lambda answer: self.answer(request_id, answer))
        except Exception as error:
            _log.exception("on_reserve failed for request %r", request_id)
            self.answer(request_id, Refused(f"on_reserve failed: {error}"))
            return
        if untaken is not None:
            self._on_free(request_id, ids_of(untaken.tables))

    def _serve_queue(self) -> None:
        """Give blocks to the requests that came first; one that must wait lets nobody past."""
        while (found := self._placement.next_in_queue()) is not None:
            request_id, granted = found
            self._take(self._open[request_id], granted)

    def _take(self, reception: Reception, answer: Granted | Refused) -> None:
        if isinstance(answer, Refused):
            reception.reason = answer.reason or "the engine refused it"
            self._feed(reception, ReceiveEvent.REFUSE)
            return
        reception.tables = self._placement.checked(reception.offer, answer)
        self._feed(reception, ReceiveEvent.GRANT)

    def _give_up(self, reception: Reception, reason: str) -> None:
        if not reception.is_terminal:
            reception.reason = reception.reason or reason
        self._feed(reception, ReceiveEvent.GIVE_UP)
        self._settle(reception)

    def _over(self, connection: str, reason: str) -> None:
        """No write of the connection can come any more."""
        for reception, writer in self._written_by(connection):
            writer.over = True
            self._give_up(reception, reason)

    def _end(self, connection: str) -> None:
        """The connection's process, or its way here, has ended."""
        self._over(connection, _WRITER_ENDED)
        self._news.forget(connection)

    def _lose(self, connection: str, reason: str) -> None:
        """A connection is not heard any more, and its process may write on."""
        self._silence.forget(connection)
        if self._of.has_ended(connection):
            self._end(connection)
            return
        for reception, _ in self._written_by(connection):
            self._give_up(reception, reason)

    def _written_by(self, connection: str) -> list[tuple[Reception, Writer]]:
        """The requests that the connection may still write to."""
        found = ((one, one.writers.get(connection)) for one in self._open.values())
        return [(one, writer) for one, writer in found if writer is not None and not writer.over]

    def _settle(self, reception: Reception) -> None:
        """Go on where the last write to a failed request is over."""
        if not reception.is_drained:
            return
        self._feed(reception, ReceiveEvent.DRAINED)
        if reception.quarantined:
            self._free(reception)

    # Actions of the table.

    def _feed(self, reception: Reception, event: ReceiveEvent) -> None:
        action = reception.machine.feed(event)
        if action:
            getattr(self, f"_on_{action}")(reception)

    def _on_start(self, reception: Reception) -> None:
        self._tell_writers(reception)

    def _on_complete(self, reception: Reception) -> None:
        self._close(reception)

    def _on_drain(self, reception: Reception) -> None:
        for connection, writer in reception.writers.items():
            if not writer.over:
                self._news.add_failure(connection, reception.offer.request_id, reception.reason)
        self._settle(reception)

    def _on_fail(self, reception: Reception) -> None:
        self._tell_writers(reception)
        self._close(reception)
        self._placement.free(reception.offer.request_id)
        self._serve_queue()

    def _on_quarantine(self, reception: Reception) -> None:
        reception.quarantined = True
        self._tell(reception)

    def _free(self, reception: Reception) -> None:
        """The last writer of a request in quarantine is over."""
        request_id, block_ids = reception.offer.request_id, ids_of(reception.tables)
        self._close(reception, tell=False)
        self._placement.free(request_id)
        self._after.append(lambda: self._on_free(request_id, block_ids))
        self._serve_queue()

    def _close(self, reception: Reception, *, tell: bool = True) -> None:
        request_id = reception.offer.request_id
        del self._open[request_id]
        self._placement.settle(request_id)
        self._ended.add(request_id, reception.reason, reception.writers)
        if tell:
            self._tell(reception)

    def _tell(self, reception: Reception) -> None:
        notice = reception.notice()
        self._after.append(lambda: self._on_notice(notice))
