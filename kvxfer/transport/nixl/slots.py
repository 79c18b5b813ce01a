"""Rows through slots: gathered on one side, scattered on the other.

Each slot goes its own way, and several are under way at once: while the network carries one, this
side's copies fill or empty a second and the far side's a third. A put::

    FILLING   this side gathers
    MOVING    NIXL writes the slot; the far side scatters it, and says so

and a get::

    ASKED     the far side gathers, and says so
    MOVING    NIXL reads the slot
    EMPTYING  this side scatters
"""

import contextlib
import time
from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from kvxfer.errors import KvxferError, ProtocolMismatch
from kvxfer.layout import CopyPlan
from kvxfer.layout.copy_plan import CopyBox
from kvxfer.transport.base import Op
from kvxfer.transport.nixl import pieces
from kvxfer.transport.nixl.agent import Agent
from kvxfer.transport.nixl.conversation import Conversation, Far
from kvxfer.transport.nixl.memory import Range, Rows
from kvxfer.transport.nixl.prepared import Prepared
from kvxfer.transport.nixl.staging import Staging
from kvxfer.transport.nixl.wire import Kind, Message

_MAX_PREPARED = 4  # lengths of pieces that a slot keeps a transfer for
# Of transfers that have not ended: NIXL or a GPU may still write there.
ABANDONED: list[object] = []


class _Stage(Enum):
    FREE = auto()
    FILLING = auto()
    ASKED = auto()
    MOVING = auto()
    EMPTYING = auto()


class _Slot:
    """A slot on both sides, and the transfers between them that it has been used for."""

    def __init__(self, index: int, near: Range, far: Range) -> None:
        self.index, self._near, self._far = index, near, far
        self.stage = _Stage.FREE
        self.piece: pieces.Piece | None = None  # what is on its way
        self.message: Message | None = None  # what goes with it
        self.moving: Prepared | None = None
        self.is_answered = False  # a put's: the far side has emptied it
        self._kept: dict[tuple[str, int], Prepared] = {}

    def prepare(self, agent: Agent, name: str, op: str, num_bytes: int) -> Prepared:
        """A transfer of the first bytes of the slot."""
        found = self._kept.get((op, num_bytes))
        if found is None:
            if len(self._kept) >= _MAX_PREPARED:
                self.release()
            near, far = (
                Rows(np.array([side.address], np.uint64), num_bytes, side.device)
                for side in (self._near, self._far)
            )
            found = self._kept[op, num_bytes] = agent.prepare(op, near, name, far)
        self.moving = found
        return found

    def is_settled(self) -> bool:
        """Whether NIXL has ended what was posted, well or not."""
        return self.moving is None or self.moving.is_settled()

    @property
    def has_failed(self) -> bool:
        """Whether NIXL ended it without delivering."""
        return self.moving is not None and self.moving.has_failed

    def release(self) -> bool:
        """Give all of them back; False where NIXL still works on one."""
        kept, self._kept, self.moving = list(self._kept.values()), {}, None
        return all([one.release() for one in kept])


class StagedRows:
    """Moves rows through the slots of a link."""

    def __init__(
        self, agent: Agent, far: Far, talk: Conversation, staging: Staging, far_slots: Range
    ) -> None:
        self._agent, self._far, self._talk, self._staging = agent, far, talk, staging
        near = staging.memory
        self._slots = [
            _Slot(index, *(_part(side, index, staging.slot_bytes) for side in (near, far_slots)))
            for index in range(staging.num_slots)
        ]
        self._op = Op.PUT
        self._number = self._num_sms = 0
        self._answers_end_s = 0.0

    def move(
        self, plan: CopyPlan, op: Op, boxes: Sequence[CopyBox], *, number: int, num_sms: int
    ) -> None:
        """Move ``boxes`` of ``plan`` as transfer ``number``, several pieces at a time.

        Raises:
            KvxferError: it failed halfway; nothing else can follow.
        """
        self._op, self._number, self._num_sms = op, number, num_sms
        start = self._fill if op is Op.PUT else self._ask
        for piece in pieces.cut(plan, boxes, self._staging.slot_bytes):
            self._talk.wait(lambda: self._go_on() < len(self._slots))
            start(next(one for one in self._slots if one.stage is _Stage.FREE), piece)
        self._talk.wait(lambda: self._go_on() == 0)

    def _go_on(self) -> int:
        """Take what has come and move on every slot that can be; how many are under way."""
        while (message := self._talk.take()) is not None:
            self._talk.require_due(message, Kind.SLOT, self._number)
            self._answered(message)
        copies = self._staging.copies
        for slot in self._slots:
            if slot.stage is _Stage.FILLING and copies.is_done(slot.index):
                self._write(slot)
            elif slot.stage is _Stage.MOVING:
                self._end_move(slot)
            elif slot.stage is _Stage.EMPTYING and copies.is_done(slot.index):
                slot.stage = _Stage.FREE
        return sum(slot.stage is not _Stage.FREE for slot in self._slots)

    def _answered(self, message: Message) -> None:
        """The far side has filled a slot, or emptied it."""
        slot = self._slots[message.slot] if message.slot < len(self._slots) else None
        if slot is not None and slot.stage is _Stage.ASKED:
            self._read(slot)
        elif slot is not None and slot.stage is _Stage.MOVING and self._op is Op.PUT:
            slot.is_answered = True
        else:
            raise ProtocolMismatch(
                f"process {self._far.pid} is done with slot {message.slot}, which it was not given"
            )

    # A put.

    def _fill(self, slot: _Slot, piece: pieces.Piece) -> None:
        slot.stage, slot.piece, slot.is_answered = _Stage.FILLING, piece, False
        self._copy(slot, piece.gather(self._staging.slot_address(slot.index)))
        slot.message = self._message(slot, Kind.SCATTER)  # beside the copy, where a GPU makes it

    def _write(self, slot: _Slot) -> None:
        moving = self._prepare(slot, "WRITE")
        slot.stage = _Stage.MOVING
        moving.post(slot.message)

    # A get.

    def _ask(self, slot: _Slot, piece: pieces.Piece) -> None:
        slot.stage, slot.piece = _Stage.ASKED, piece
        self._agent.send(self._far.name, self._message(slot, Kind.GATHER))

    def _read(self, slot: _Slot) -> None:
        moving = self._prepare(slot, "READ")
        slot.stage = _Stage.MOVING
        moving.post()

    def _end_move(self, slot: _Slot) -> None:
        assert slot.moving is not None
        assert slot.piece is not None
        if not slot.moving.poll():
            return
        if self._op is Op.GET:
            slot.stage = _Stage.EMPTYING
            self._copy(slot, slot.piece.scatter(self._staging.slot_address(slot.index)))
        elif slot.is_answered:
            slot.stage = _Stage.FREE

    # Either.

    def _copy(self, slot: _Slot, plan: CopyPlan) -> None:
        self._staging.copies.start(slot.index, plan, num_sms=self._num_sms)

    def _prepare(self, slot: _Slot, op: str) -> Prepared:
        assert slot.piece is not None
        return slot.prepare(self._agent, self._far.name, op, slot.piece.wire_bytes)

    def _message(self, slot: _Slot, kind: Kind) -> Message:
        assert slot.piece is not None
        half = pieces.encode_half(slot.piece, source=kind is Kind.GATHER)
        return Message(self._talk.key, kind, slot.index, self._number, half)

    # The end.

    def stop(self, answers_s: float) -> None:
        """End this side's copies, which touch pages, and move nothing more.

        The far side is waited for, as it may be about to scatter what has arrived: for
        ``answers_s`` where it is of another host.
        """
        with contextlib.suppress(KvxferError):
            self._staging.copies.close()
        self._answers_end_s = time.monotonic() + answers_s

    def is_settled(self) -> bool:
        """Whether nothing moves any more: NIXL has ended all, and the far side is done with it."""
        self._hear()
        if not all([slot.is_settled() for slot in self._slots]):
            return False
        if not any(self._is_scattered(slot) for slot in self._slots) or self._far.has_ended:
            return True
        # A process that can be looked at and has not ended scatters once it goes on.
        return self._far.watch is None and time.monotonic() >= self._answers_end_s

    def _hear(self) -> None:
        """Take answers to what was posted before :meth:`stop`."""
        with contextlib.suppress(KvxferError):
            self._agent.pump()
            while (message := self._talk.take()) is not None:
                self._talk.require_due(message, Kind.SLOT, self._number)
                for slot in self._slots:
                    slot.is_answered |= slot.index == message.slot

    def _is_scattered(self, slot: _Slot) -> bool:
        """Whether the far side may still scatter a slot, of which it says the end."""
        is_given = self._op is Op.PUT and slot.stage is _Stage.MOVING and not slot.is_answered
        return is_given and not self._talk.is_refused and not slot.has_failed

    def close(self) -> bool:
        """Give everything back, once it is settled.

        False where NIXL or the GPU may still use some of it, which is kept for good then.
        """
        is_over = False
        with contextlib.suppress(KvxferError):
            self._staging.copies.close()  # where :meth:`stop` was in vain
            is_over = all([slot.release() for slot in self._slots])
            if is_over:
                self._staging.close()
        if not is_over:
            ABANDONED.append((self._staging, self._slots))
        return is_over


def _part(whole: Range, index: int, num_bytes: int) -> Range:
    return Range(whole.address + index * num_bytes, num_bytes, whole.device)
