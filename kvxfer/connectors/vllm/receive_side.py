"""The decode side in a worker: joins what senders ask for with what the scheduler places."""

import heapq
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.connectors.vllm.counters import Counters
from kvxfer.connectors.vllm.pages import Pages
from kvxfer.connectors.vllm.params import split_attempt
from kvxfer.connectors.vllm.step import Placement, StepPlan
from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout
from kvxfer.session import Deferred, Granted, Notice, Offer, Receiver, Refused

_log = logging.getLogger(__name__)
_MAX_KEPT = 1 << 16
# How long a failed attempt waits for the next one: a sender begins that one first and gives this
# one up right after, but the two calls may overtake each other.
_SUCCESSOR_S = 0.05
_HERE = "it is here already"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request that the scheduler waits for ended.

    Attributes:
        request_id: vLLM's.
        failed_block_ids: blocks that must be computed, as the scheduler numbers them.
        is_failed: its KV did not arrive.
    """

    request_id: str
    failed_block_ids: frozenset[int] = frozenset()
    is_failed: bool = False


@dataclass(slots=True)
class _Asking:
    """An attempt that waits for an answer."""

    number: int
    format: str
    offer: Offer
    answer: Deferred


@dataclass(slots=True)
class _Incoming:
    """A placed request.

    Attributes:
        end_s: when it fails, while no attempt writes.
        number: of the last attempt that had the blocks.
        writing: that attempt, until it has ended.
        following: the one after it, which has asked already.
        reason: why the last attempt failed.
        is_quarantined: that attempt may write on although it failed.
        is_given_up: nobody wants it any more.
        num_bytes: what the last attempt was to write.
    """

    placement: Placement
    placed_s: float
    end_s: float
    number: int = 0
    writing: str | None = None
    following: _Asking | None = None
    reason: str = ""
    is_quarantined: bool = False
    is_given_up: bool = False
    num_bytes: int = 0


class ReceiveSide:
    """Requests of one rank. Each one placed ends exactly once, and never before its last writer.

    Where two threads meet (the engine's and the one that serves senders), the receiver is called
    last, with the lock held: it calls back on the same thread, and without a lock of its own.
    """

    def __init__(
        self, pages: Pages, counters: Counters, *, timeout_s: float, tells_failures: bool = True
    ) -> None:
        """No requests yet.

        Args:
            pages: how the cache divides the scheduler's blocks.
            counters: of what happens.
            timeout_s: how long a request that has blocks waits for its sender.
            tells_failures: the engine can be told of one. If not, a request that fails stays until
                the engine gives it up: any other end would have it run without its KV.
        """
        self._pages = pages
        self._counters = counters
        self._timeout_s = timeout_s
        self._tells_failures = tells_failures
        self._lock = threading.RLock()
        self._incoming: dict[str, _Incoming] = {}
        self._asking: dict[str, _Asking] = {}  # what the scheduler has not placed yet
        self._closed: OrderedDict[str, str] = OrderedDict()
        # Whose sender left before they were placed.
        self._left: OrderedDict[str, str] = OrderedDict()
        self._deadlines: list[tuple[float, str]] = []  # a heap
        self._ended: list[Ended] = []
        self._abort: Callable[[str, str], None] = lambda request_id, reason: None
        self._layout: KVLayout | None = None

    def attach(self, receiver: Receiver, layout: KVLayout) -> None:
        """Use ``receiver``, of this rank's ``layout``; its callbacks are the ``on_`` methods."""
        self._abort = receiver.abort
        self._layout = layout

    def begin_step(self, plan: StepPlan) -> None:
        """Take up what the scheduler says."""
        for placement in plan.placements:
            self._place(placement)
        for given_up in plan.given_up:
            self._give_up(given_up.transfer_id, given_up.reason)

    def take_ended(self, now_s: float | None = None) -> list[Ended]:
        """Requests that have ended since the last call; each comes once.

        Args:
            now_s: of ``time.monotonic``; None = now.
        """
        now_s = time.monotonic() if now_s is None else now_s
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now_s:
                self._check(heapq.heappop(self._deadlines)[1], now_s)
            ended, self._ended = self._ended, []
            return ended

    # The receiver's callbacks.

    def on_reserve(self, offer: Offer) -> Granted | Refused | Deferred:
        """A sender asks for blocks: they are there already, or the scheduler will place them."""
        transfer_id, number, page_format = split_attempt(offer.request_id)
        asking = _Asking(number, page_format, offer, Deferred())
        with self._lock:
            if transfer_id in self._closed:
                return Refused(self._closed[transfer_id])
            incoming = self._incoming.get(transfer_id)
            if incoming is None:
                _refuse(self._asking.get(transfer_id))
                self._asking[transfer_id] = asking
                self._left.pop(transfer_id, None)
            elif number <= incoming.number or incoming.is_given_up:
                return Refused(f"attempt {incoming.number} or the decoder's end came before it")
            elif incoming.writing is None:
                return self._answer(incoming, asking)
            else:
                _refuse(incoming.following)
                incoming.following = asking
                self._abort(incoming.writing, "a later attempt takes its place")
        return asking.answer

    def on_notice(self, notice: Notice) -> None:
        """An attempt has ended."""
        transfer_id, _, _ = split_attempt(notice.request_id)
        with self._lock:
            if _is_of(self._asking.get(transfer_id), notice):
                del self._asking[transfer_id]
                _keep(self._left, transfer_id, notice.reason)
            incoming = self._incoming.get(transfer_id)
            if incoming is None:
                return
            if _is_of(incoming.following, notice):
                incoming.following = None
            if incoming.writing != notice.request_id:
                return
            incoming.reason = notice.reason
            if notice.ok:
                self._end(incoming, "")
            elif notice.quarantined:
                incoming.is_quarantined = True
                self._counters.add_quarantined(len(notice.block_ids))
            else:
                self._writer_over(incoming)

    def on_free(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """The last writer to blocks in quarantine is over."""
        transfer_id, _, _ = split_attempt(request_id)
        with self._lock:
            incoming = self._incoming.get(transfer_id)
            if incoming is not None and incoming.is_quarantined and incoming.writing == request_id:
                incoming.is_quarantined = False
                self._counters.add_quarantined(-len(block_ids))
                self._writer_over(incoming)

    # With the lock.

    def _place(self, placement: Placement) -> None:
        now_s = time.monotonic()
        transfer_id = placement.transfer_id
        incoming = _Incoming(placement, now_s, now_s + self._timeout_s)
        with self._lock:
            assert transfer_id not in self._incoming, "the tracker places a transfer once"
            self._incoming[transfer_id] = incoming
            if transfer_id in self._closed:
                self._end(incoming, self._closed[transfer_id])
                return
            if transfer_id in self._left:  # only the next attempt may come yet
                incoming.reason = self._left.pop(transfer_id)
                incoming.end_s = now_s + _SUCCESSOR_S
            heapq.heappush(self._deadlines, (incoming.end_s, transfer_id))
            asking = self._asking.pop(transfer_id, None)
            if asking is not None:
                self._give(incoming, asking)

    def _give_up(self, transfer_id: str, reason: str) -> None:
        with self._lock:
            incoming = self._incoming.get(transfer_id)
            if incoming is None:
                self._close(transfer_id, reason)
                _refuse(self._asking.pop(transfer_id, None), reason)
                return
            incoming.is_given_up = True
            if incoming.writing is None:
                self._end(incoming, reason)
            else:
                self._abort(incoming.writing, reason)

    def _answer(self, incoming: _Incoming, asking: _Asking) -> Granted | Refused:
        """Let an attempt write, unless it is not what the scheduler expects."""
        placement, offer = incoming.placement, asking.offer
        num_units = self._pages.num_units(placement.num_tokens)
        if offer.tokens != range(num_units) or asking.format != self._pages.format:
            reason = (
                f"the prefill engine sends {len(offer.tokens)} units of {asking.format} pages, the "
                f"decoder expects {num_units} of {self._pages.format}; give both the same prompt, "
                "and run both on the same kind of device"
            )
            self._end(incoming, reason)
            return Refused(reason)
        if incoming.number:
            self._counters.add(num_retries=1)
        incoming.number, incoming.writing = asking.number, offer.request_id
        incoming.reason = ""
        granted = self._pages.target(placement.tables, offer)
        incoming.num_bytes = _num_bytes(self._layout, offer, granted)
        return granted

    def _give(self, incoming: _Incoming, asking: _Asking) -> None:
        """The same for one that waits."""
        answer = self._answer(incoming, asking)
        if isinstance(answer, Refused):
            asking.answer.refuse(answer.reason)
            return
        try:
            asking.answer.grant(answer.block_ids, answer.first_token)
        except InvalidUsage as error:  # this request fails, and no other: its notice says so
            asking.answer.refuse(str(error))

    def _writer_over(self, incoming: _Incoming) -> None:
        """The attempt that wrote has failed, and writes no more."""
        incoming.writing = None
        following, incoming.following = incoming.following, None
        if incoming.is_given_up:
            self._end(incoming, incoming.reason)
        elif following is not None:
            self._give(incoming, following)
        else:
            incoming.end_s = time.monotonic() + _SUCCESSOR_S
            heapq.heappush(self._deadlines, (incoming.end_s, incoming.placement.transfer_id))

    def _check(self, transfer_id: str, now_s: float) -> None:
        incoming = self._incoming.get(transfer_id)
        if incoming is not None and incoming.writing is None and incoming.end_s <= now_s:
            late = f"no prefill engine came for it within {self._timeout_s:g} s"
            self._end(incoming, incoming.reason or late)

    def _end(self, incoming: _Incoming, reason: str) -> None:
        transfer_id = incoming.placement.transfer_id
        self._close(transfer_id, reason or _HERE)
        following, incoming.following = incoming.following, None
        _refuse(following, reason or _HERE)
        if reason and not incoming.is_given_up:
            self._counters.add(num_failed_receives=1)
            request_id = incoming.placement.request_id
            _log.warning("request %s was not received: %s", request_id, reason)
            if not self._tells_failures:
                incoming.end_s = math.inf
                _log.error("this vLLM cannot be told so: %s waits until it is aborted", request_id)
                return
        del self._incoming[transfer_id]
        self._report(incoming, reason)

    def _report(self, incoming: _Incoming, reason: str) -> None:
        placement = incoming.placement
        if not reason and placement.awaited:
            waited_s = time.monotonic() - incoming.placed_s
            self._counters.add_received(incoming.num_bytes, waited_s)
        if placement.awaited:
            is_failed = bool(reason) and not incoming.is_given_up
            ids = {one for table in placement.tables for one in table.block_ids}
            self._ended.append(
                Ended(placement.request_id, frozenset(ids if is_failed else ()), is_failed)
            )

    def _close(self, transfer_id: str, reason: str) -> None:
        self._left.pop(transfer_id, None)
        _keep(self._closed, transfer_id, reason)


def _keep(reasons: OrderedDict[str, str], transfer_id: str, reason: str) -> None:
    reasons[transfer_id] = reason
    if len(reasons) > _MAX_KEPT:
        reasons.popitem(last=False)


def _refuse(asking: _Asking | None, reason: str = "a later attempt takes its place") -> None:
    if asking is not None:
        asking.answer.refuse(reason)


def _num_bytes(layout: KVLayout | None, offer: Offer, granted: Granted) -> int:
    """What an offer writes into the blocks that were granted for it."""
    if layout is None:
        return 0
    num_units = 0
    for layer in range(layout.num_layers):
        first = granted.tables[layout.group_of(layer)].first_token
        needed = layout.needed_by(layer, offer.tokens)
        num_units += max(needed.stop - max(needed.start, first), 0)
    return num_units * layout.bytes_per_token_per_layer


def _is_of(asking: _Asking | None, notice: Notice) -> bool:
    return asking is not None and asking.offer.request_id == notice.request_id
