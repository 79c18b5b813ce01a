"""One request on its way to one rank."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kvxfer.control import AbortRequest, CommitRequest, ReserveReply, ReserveRequest
from kvxfer.control.messages import MAX_BLOCK_IDS
from kvxfer.errors import (
    ControlTimeout,
    InvalidUsage,
    KvxferError,
    NotAvailable,
    PeerLost,
    ProtocolMismatch,
    RegistrationError,
    TransferFailed,
    TransferTimeout,
)
from kvxfer.session.peer import Peer
from kvxfer.session.shipment import Shipment
from kvxfer.session.state_machine import Machine
from kvxfer.session.states import SEND_TABLE, SendEvent, Sending, SendLimits
from kvxfer.session.way import Way
from kvxfer.transport import Transfer

if TYPE_CHECKING:
    from kvxfer.session.target import Target

_log = logging.getLogger(__name__)
_PAUSE_S = 60.0  # the longest after which blocks are asked for again
_CALL_S = 1.0  # an unanswered call is made again after it, until the state's time is over
# A peer that was met as another, or whose memory is another by now.
GONE = (PeerLost, RegistrationError)


class Delivery:
    """A walk through `SEND_TABLE`. All methods are of the sender's thread."""

    def __init__(self, shipment: Shipment, target: "Target", limits: SendLimits) -> None:
        """Of ``shipment`` to ``target``."""
        self.error: KvxferError | None = None
        self.machine: Machine[Sending, SendEvent] = Machine(SEND_TABLE, limits)
        self._shipment = shipment
        self._target = target
        self._limits = limits
        self._attempt = 1
        self._peer: Peer | None = None
        self._way: Way | None = None
        self._again_s = float("inf")  # when to ask for blocks again
        self._decided = False  # the peer would answer now
        target.want(self)

    @property
    def request_id(self) -> str:
        """Of the request."""
        return self._shipment.request_id

    @property
    def is_terminal(self) -> bool:
        """Whether it has ended."""
        return self.machine.state in (Sending.DONE, Sending.FAILED)

    @property
    def in_flight(self) -> list[Transfer]:
        """Copies that have not ended."""
        return [] if self._way is None else self._way.in_flight

    @property
    def must_look(self) -> bool:
        """Whether copies are in flight whose end is seen by :meth:`step` alone."""
        return self._way is not None and self._way.must_look

    @property
    def next_s(self) -> float:
        """When :meth:`step` has something to do at the latest."""
        return min(self.machine.end_s, self._again_s)

    def feed(self, event: SendEvent, error: KvxferError | None = None) -> None:
        """Something has happened; an action that fails fails this delivery alone."""
        if error is not None and not self.is_terminal:
            # What comes of a loss, such as the refusal of the same request again, is no news.
            self.error = self.error or error if event is SendEvent.LOST else error
        action = self.machine.feed(event)
        if action:
            self._again_s = float("inf")  # of the state before
            self._guard(getattr(self, f"_on_{action}"))

    def is_due(self, now_s: float) -> bool:
        """Whether :meth:`step` has something to do: thousands may wait while few move."""
        moves = self.machine.state in (Sending.MOVING, Sending.LEAVING, Sending.DRAINING)
        return moves or now_s >= self.next_s or bool(self._shipment.given_up)

    def ask_again(self) -> None:
        """The peer, which had it wait for blocks, would answer now."""
        self._decided = True  # what has it wait may come later than this, by another connection
        if self._again_s < float("inf"):
            self._again_s = 0.0

    def step(self, now_s: float) -> None:
        """Go on: what is in flight, what is ready, and what is late."""
        self._guard(lambda: self._go_on(now_s))
        if self.machine.is_late(now_s):
            self._guard(self._end_state)

    def _guard(self, call: Callable[[], object]) -> None:
        """Have an exception end this delivery, and not the thread that serves the others too."""
        try:
            call()
        except Exception as error:
            self.feed(SendEvent.ERROR, as_ours(error, f"request {self.request_id!r}"))

    def _go_on(self, now_s: float) -> None:
        if self._shipment.given_up:
            self.feed(SendEvent.CANCEL)
        state = self.machine.state
        if state is Sending.RESERVING and now_s >= self._again_s:
            self._on_reserve()
        elif state is Sending.MOVING:
            self._move()
        elif state in (Sending.LEAVING, Sending.DRAINING):
            self._drain()

    def _end_state(self) -> None:
        self.error = self.error or self._target.last_error or self._too_long()
        self.feed(SendEvent.LATE)

    # Actions of the table.

    def _on_reserve(self) -> None:
        self._again_s, self._decided = float("inf"), False
        peer = self._peer = self._target.peer
        tokens = self._shipment.tokens
        num_blocks = sum(map(len, peer.view.shard.model.needed_blocks(tokens)))
        if num_blocks > MAX_BLOCK_IDS:
            raise InvalidUsage(
                f"request {self.request_id!r} takes {num_blocks} blocks at its receiver, the limit "
                f"is {MAX_BLOCK_IDS}; send fewer tokens"
            )
        request = ReserveRequest(
            request_id=self.request_id,
            num_blocks=num_blocks,
            epoch=peer.epoch,
            incarnation=peer.connection,
            tokens=(tokens.start, tokens.stop),
        )
        self._call(request, self._on_reserved)

    def _on_reserved(self, answer: msgspec.Struct) -> None:
        assert isinstance(answer, ReserveReply)
        if answer.state == "wait":
            pause_s = 0.0 if self._decided else min(max(answer.retry_after_s, 0.001), _PAUSE_S)
            self._again_s = time.monotonic() + pause_s
        elif answer.state == "refused":
            self.feed(SendEvent.ERROR, self._refused(answer.reason))
        else:
            self._granted(answer)

    def _refused(self, reason: str) -> KvxferError:
        """Of a request that is sent anew the first cause: a receiver that lives has ended it."""
        text = f"the receiver refused request {self.request_id!r}: {reason}"
        if self.error is None:
            return NotAvailable(text)
        return type(self.error)(f"{self.error}; sent anew, {text}")

    def _granted(self, answer: ReserveReply) -> None:
        try:
            self._way = Way(self._target.peer, self._target.poster, self._shipment.tokens, answer)
        except KvxferError as error:
            self.feed(SendEvent.ERROR, error)
        else:
            self.feed(SendEvent.GRANTED)

    def _on_move(self) -> None:
        self._move()

    def _move(self) -> None:
        """Post what is ready, and see what has arrived."""
        way = self._way
        assert way is not None
        parts, complete = self._shipment.ready(way.num_posted)
        try:
            for part in parts:
                if way.is_full:
                    complete = False
                    break
                way.post(part, self._shipment.tuning)
            way.collect()
        except PeerLost as error:
            self._target.lose(error)
            return
        except Exception as error:
            self.feed(SendEvent.ERROR, as_ours(error, f"request {self.request_id!r}"))
            return
        if complete and not way.in_flight:
            # Whoever cancelled meanwhile may have used the blocks again before they were read.
            self.feed(SendEvent.CANCEL if self._shipment.given_up else SendEvent.MOVED)

    def _on_commit(self) -> None:
        way = self._way
        assert way is not None
        request = CommitRequest(self.request_id, way.peer.connection, sequence=way.sequence)
        self._call(request, lambda answer: self.feed(SendEvent.COMMITTED))

    def _on_leave(self) -> None:
        self._drain()

    def _on_drain(self) -> None:
        self._drain()

    def _drain(self) -> None:
        if self._way is not None:
            try:
                self._way.collect()
            except Exception as error:
                self.error = self.error or as_ours(error, f"request {self.request_id!r}")
        if not self.in_flight:
            self.feed(SendEvent.DRAINED)

    def _on_reconnect(self) -> None:
        self._way = None
        self._attempt += 1
        if self._attempt > self._limits.num_attempts:
            self.feed(SendEvent.ERROR)
        else:
            self._target.want(self)

    def _on_abort(self) -> None:
        if not self._target.holds(self._peer):
            self.feed(SendEvent.LOST)
            return
        reason = str(self.error or self._shipment.given_up or "the sender gave it up")[:1000]
        request = AbortRequest(self.request_id, self._target.peer.connection, reason=reason)
        self._call(request, lambda answer: self.feed(SendEvent.ABORTED))

    def _on_owe(self) -> None:
        if self._target.holds(self._peer):
            self._target.owe(self.request_id, self.in_flight)
        if self.in_flight:
            self.error = TransferTimeout(
                f"copies of request {self.request_id!r} did not end; keep its blocks: they may "
                "still be read"
            )
        self._on_end()

    def _on_end(self) -> None:
        error = self.error
        if self.machine.state is Sending.DONE:
            error = None
        elif error is None:
            error = self._reason_of_end()
        self._target.forget(self)
        way = self._way
        if way is None:
            self._shipment.end_rank(0, error)
        else:
            self._shipment.end_rank(way.num_bytes, error, path=way.path)

    def _reason_of_end(self) -> KvxferError:
        if self._shipment.given_up:
            return TransferFailed(self._shipment.given_up)
        return self._target.last_error or self._too_long()

    def _too_long(self) -> ControlTimeout:
        return ControlTimeout(
            f"request {self.request_id!r} to {self._target.address} was "
            f"{self.machine.state.value} for too long; check that the peer lives"
        )

    # Calls.

    def _call(self, message: msgspec.Struct, on_answer: Callable[[msgspec.Struct], None]) -> None:
        """Ask the peer; without an answer again, until the state's time is over."""
        serial = self.machine.serial

        def hear(answer: msgspec.Struct | KvxferError) -> None:
            if serial != self.machine.serial:
                return  # of an earlier state
            if isinstance(answer, GONE):
                self._target.lose(answer)
            elif isinstance(answer, ControlTimeout):
                self._target.last_error = answer
                self._target.call(message, _CALL_S, take)
            elif isinstance(answer, KvxferError):
                self.feed(SendEvent.ERROR, answer)
            elif isinstance(answer, ReserveReply) == isinstance(message, ReserveRequest):
                on_answer(answer)
            else:
                text = f"{type(message).__name__} was answered with {type(answer).__name__}"
                self.feed(SendEvent.ERROR, ProtocolMismatch(text))

        def take(answer: msgspec.Struct | KvxferError) -> None:
            self._guard(lambda: hear(answer))

        self._target.call(message, _CALL_S, take)


def as_ours(error: Exception, what: str) -> KvxferError:
    """``error`` as what a caller can be told of ``what``."""
    if isinstance(error, KvxferError):
        return error
    _log.error("%s failed", what, exc_info=error)
    return TransferFailed(f"{what}: {type(error).__name__}: {error}")
