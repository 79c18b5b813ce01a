"""One request on its way to one rank."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kvxfer.control import AbortRequest, CommitRequest, ReserveReply, ReserveRequest
from kvxfer.errors import (
    ControlTimeout,
    KvxferError,
    NotAvailable,
    PeerLost,
    ProtocolMismatch,
    RegistrationError,
    TransferFailed,
    TransferTimeout,
)
from kvxfer.layout import BlockTable
from kvxfer.session.peer import Peer
from kvxfer.session.send_handle import SendHandle
from kvxfer.session.state_machine import Machine
from kvxfer.session.states import SEND_TABLE, SendEvent, Sending, SendLimits
from kvxfer.transport import Transfer, Tuning

if TYPE_CHECKING:
    from kvxfer.session.target import Target

_CALL_S = 1.0  # an unanswered call is made again after it, until the state's time is over
# A peer that was met as another, or whose memory is another by now.
GONE = (PeerLost, RegistrationError)


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is sent to every rank.

    Attributes:
        blocks: the request's blocks here.
        tokens: which of its tokens.
        tuning: how to copy.
    """

    blocks: BlockTable
    tokens: range
    tuning: Tuning | None


@dataclass(slots=True)
class _Way:
    """Where a delivery writes, of one attempt."""

    peer: Peer
    blocks: BlockTable
    tokens: range
    num_posted: int = 0
    sequence: int = 0
    num_bytes: int = 0
    path: str = ""
    in_flight: list[Transfer] = field(default_factory=list)


class Delivery:
    """A walk through `SEND_TABLE`. All methods are of the sender's thread."""

    def __init__(
        self, handle: SendHandle, parcel: Parcel, target: "Target", limits: SendLimits
    ) -> None:
        """On the way of ``parcel`` to ``target``."""
        self.handle = handle
        self.error: KvxferError | None = None
        self.machine: Machine[Sending, SendEvent] = Machine(SEND_TABLE, limits)
        self._parcel = parcel
        self._target = target
        self._limits = limits
        self._attempt = 1
        self._peer: Peer | None = None
        self._way: _Way | None = None
        self._again_s = float("inf")  # when to ask for blocks again
        target.want(self)

    @property
    def request_id(self) -> str:
        """Of the request."""
        return self.handle.request_id

    @property
    def is_terminal(self) -> bool:
        """Whether it has ended."""
        return self.machine.state in (Sending.DONE, Sending.FAILED)

    @property
    def in_flight(self) -> list[Transfer]:
        """Copies that have not ended."""
        return [] if self._way is None else self._way.in_flight

    @property
    def next_s(self) -> float:
        """When :meth:`step` has something to do at the latest."""
        return min(self.machine.end_s, self._again_s)

    def feed(self, event: SendEvent, error: KvxferError | None = None) -> None:
        """Something has happened."""
        if error is not None and not self.is_terminal:
            self.error = error
        action = self.machine.feed(event)
        if action:
            getattr(self, f"_on_{action}")()

    def step(self, now_s: float) -> None:
        """Go on: what is in flight, what is ready, and what is late."""
        if self.handle.is_given_up:
            self.feed(SendEvent.CANCEL)
        state = self.machine.state
        if state is Sending.RESERVING and now_s >= self._again_s:
            self._on_reserve()
        elif state is Sending.MOVING:
            self._move()
        elif state in (Sending.LEAVING, Sending.DRAINING):
            self._drain()
        if self.machine.is_late(now_s):
            self.error = self.error or self._target.last_error or self._too_long()
            self.feed(SendEvent.LATE)

    # Actions of the table.

    def _on_reserve(self) -> None:
        self._again_s = float("inf")
        peer = self._peer = self._target.peer
        tokens, size = self._parcel.tokens, peer.view.layout.block_size
        first = tokens.start // size
        num_blocks = -(-tokens.stop // size) - first if tokens else 0
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
            self._again_s = time.monotonic() + min(max(answer.retry_after_s, 0.001), 1.0)
        elif answer.state == "refused":
            text = f"the receiver refused request {self.request_id!r}: {answer.reason}"
            self.feed(SendEvent.ERROR, NotAvailable(text))
        else:
            self._granted(answer)

    def _granted(self, answer: ReserveReply) -> None:
        peer, tokens = self._target.peer, self._parcel.tokens
        size, first = peer.view.layout.block_size, answer.first_token
        earliest = tokens.start // size * size
        wanted = max(-(-tokens.stop // size) - first // size, 0) if tokens else 0
        ids = answer.block_ids
        if (
            len(ids) != wanted
            or (tokens and (first % size or first < earliest))
            or (ids and max(ids) >= peer.view.num_blocks)
        ):
            text = (
                f"the receiver granted {len(ids)} blocks from token {first}, up to id "
                f"{max(ids, default=-1)}; wanted {wanted} of a cache of {peer.view.num_blocks}"
            )
            self.feed(SendEvent.ERROR, ProtocolMismatch(text))
            return
        moved = range(min(max(tokens.start, first), tokens.stop), tokens.stop)
        self._way = _Way(peer, BlockTable(ids, first if ids else 0), moved)
        self.feed(SendEvent.GRANTED)

    def _on_move(self) -> None:
        self._move()

    def _move(self) -> None:
        """Post what is ready, and see what has arrived."""
        way = self._way
        assert way is not None
        pieces, complete = self.handle.ready(way.num_posted)
        try:
            for piece in pieces:
                transfer = way.peer.put(
                    self._parcel.blocks if way.tokens else BlockTable([]),
                    way.blocks if way.tokens else BlockTable([]),
                    tokens=way.tokens if way.tokens else None,
                    layers=piece.layers,
                    tuning=self._parcel.tuning,
                    after_stream=piece.after_stream,
                )
                way.num_posted += 1
                way.sequence = transfer.sequence
                way.num_bytes += transfer.num_bytes
                way.path = transfer.actual_path if transfer.num_bytes else way.path
                way.in_flight.append(transfer)
            self._collect()
        except PeerLost as error:
            self._target.lose(error)
            return
        except Exception as error:
            self.feed(SendEvent.ERROR, _as_ours(error, self.request_id))
            return
        if complete and not way.in_flight:
            self.feed(SendEvent.MOVED)

    def _collect(self) -> None:
        """Forget the transfers that have ended; raises what one of them ended with."""
        assert self._way is not None
        flying = self._way.in_flight
        while flying:
            try:
                ended = flying[0].poll(0.0)
            except Exception:
                flying.pop(0)
                raise
            if not ended:
                return
            flying.pop(0)

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
                self._collect()
            except Exception as error:
                self.error = self.error or _as_ours(error, self.request_id)
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
        reason = str(self.error or "the sender gave it up")[:1000]
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
            self.handle.end_rank(0, error)
        else:
            self.handle.end_rank(way.num_bytes, error, path=way.path)

    def _reason_of_end(self) -> KvxferError:
        if self.handle.is_given_up:
            return TransferFailed(f"request {self.request_id!r} was cancelled")
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

        def take(answer: msgspec.Struct | KvxferError) -> None:
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

        self._target.call(message, _CALL_S, take)


def _as_ours(error: Exception, request_id: str) -> KvxferError:
    if isinstance(error, KvxferError):
        return error
    return TransferFailed(f"request {request_id!r}: {type(error).__name__}: {error}")
