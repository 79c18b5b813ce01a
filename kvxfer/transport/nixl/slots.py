"""Rows through slots: gathered on one side, scattered on the other."""

from collections.abc import Sequence

import numpy as np

from kvxfer import _core
from kvxfer.errors import ProtocolMismatch
from kvxfer.layout import CopyPlan
from kvxfer.layout.copy_plan import CopyBox
from kvxfer.transport.base import Op
from kvxfer.transport.host_copy import plan_tables
from kvxfer.transport.nixl import pieces, wire
from kvxfer.transport.nixl.agent import Agent, Prepared
from kvxfer.transport.nixl.conversation import Conversation, Far
from kvxfer.transport.nixl.staging import Staging
from kvxfer.transport.nixl.wire import Kind, Message

_MAX_PREPARED = 4  # lengths of pieces that a slot keeps a transfer for
# Of transfers that NIXL could not end: it may still write there.
ABANDONED: list[object] = []


class _Slot:
    """A slot on both sides, and the transfers between them that it has been used for."""

    def __init__(self, index: int, near: int, far: int) -> None:
        self.index, self.near, self.far = index, near, far
        self.piece: pieces.Piece | None = None  # what is on its way
        self.first_byte = 0
        self.is_put = True
        self.is_read = False  # of a get: gathered by the far side, and on its way
        self._kept: dict[tuple[str, int, int], Prepared] = {}
        self.current: Prepared | None = None

    def prepare(self, agent: Agent, name: str, op: str, begin: int, end: int) -> Prepared:
        """A transfer of the bytes from ``begin`` to ``end`` of the slot."""
        found = self._kept.get((op, begin, end))
        if found is None:
            if len(self._kept) >= _MAX_PREPARED:
                self.release()
            near, far = (
                np.array([[address + begin, end - begin, 0]], np.uint64)
                for address in (self.near, self.far)
            )
            found = self._kept[op, begin, end] = agent.prepare(op, near, name, far)
        self.current = found
        return found

    def release(self) -> bool:
        """Give all of them back; False where NIXL still works on one."""
        kept, self._kept, self.current = list(self._kept.values()), {}, None
        return all([one.release() for one in kept])


class Slots:
    """The slots of a link, and the threads that fill and empty them."""

    def __init__(
        self, agent: Agent, far: Far, talk: Conversation, welcome: wire.Welcome, num_threads: int
    ) -> None:
        self._agent, self._far, self._talk = agent, far, talk
        self._staging = staging = Staging(agent, welcome.num_slots, welcome.slot_bytes)
        self._slots = [
            _Slot(index, staging.slot_address(index), welcome.address + index * staging.slot_bytes)
            for index in range(welcome.num_slots)
        ]
        self._num_threads = num_threads
        self._pool: _core.WorkerPool | None = None

    def move(self, plan: CopyPlan, op: Op, boxes: Sequence[CopyBox], number: int) -> None:
        """Move ``boxes`` of ``plan``, several pieces at a time.

        Raises:
            KvxferError: it failed halfway; nothing else can follow.
        """
        if self._pool is None:
            self._pool = _core.WorkerPool(self._num_threads)
        free = list(self._slots)
        start = self._start_put if op is Op.PUT else self._start_get
        for piece in pieces.cut(plan, boxes, self._staging.slot_bytes - pieces.TABLE_BYTES):
            if not free:
                free.append(self._end_one(number))
            start(free.pop(), piece, number)
        while len(free) < len(self._slots):
            free.append(self._end_one(number))

    def _end_one(self, number: int) -> _Slot:
        """Wait until a piece is in its place."""
        ended: list[_Slot] = []

        def look() -> bool:
            for slot in self._slots:
                if slot.current is not None and slot.current.poll() and slot.is_read:
                    ended.append(slot)
                    return True
            message = self._talk.take()
            if message is not None:
                self._talk.require_due(message, Kind.SLOT, number)
                slot = self._slot_of(message)
                if slot.is_put:
                    ended.append(slot)
                else:
                    self._read(slot)
            return bool(ended)

        self._talk.wait(look)
        slot = ended[0]
        assert slot.current is not None
        self._talk.wait(slot.current.poll)
        if slot.is_read:
            assert slot.piece is not None
            self._run(slot.piece.scatter(slot.near + slot.first_byte))
        slot.piece, slot.current, slot.is_read = None, None, False
        return slot

    def _slot_of(self, message: Message) -> _Slot:
        slot = self._slots[message.slot] if message.slot < len(self._slots) else None
        if slot is None or slot.piece is None or slot.is_read:
            raise ProtocolMismatch(f"the peer is done with slot {message.slot}, which is free")
        return slot

    def _start_put(self, slot: _Slot, piece: pieces.Piece, number: int) -> None:
        table_bytes = self._enter(slot, piece, is_put=True)
        self._run(piece.gather(slot.near + slot.first_byte))
        self._send(slot, Kind.SCATTER, table_bytes, slot.first_byte + piece.wire_bytes, number)

    def _start_get(self, slot: _Slot, piece: pieces.Piece, number: int) -> None:
        table_bytes = self._enter(slot, piece, is_put=False)
        self._send(slot, Kind.GATHER, table_bytes, table_bytes, number)

    def _read(self, slot: _Slot) -> None:
        assert slot.piece is not None
        slot.is_read = True
        end = slot.first_byte + slot.piece.wire_bytes
        slot.prepare(self._agent, self._far.name, "READ", slot.first_byte, end).post()

    def _enter(self, slot: _Slot, piece: pieces.Piece, *, is_put: bool) -> int:
        """Have a slot carry a piece; returns the length of the tables at its start."""
        num_bytes = piece.table_bytes(with_scales=not is_put)
        slot.piece, slot.is_put, slot.first_byte = piece, is_put, pieces.data_offset(num_bytes)
        plan = piece.scatter(slot.first_byte) if is_put else piece.gather(slot.first_byte)
        tables = pieces.encode_tables(plan)
        assert len(tables) == num_bytes
        start = slot.near - self._staging.address
        self._staging.bytes[start : start + num_bytes] = np.frombuffer(tables, np.uint8)
        return num_bytes

    def _send(self, slot: _Slot, kind: Kind, table_bytes: int, end: int, number: int) -> None:
        message = Message(self._talk.key, kind, slot.index, table_bytes, number)
        slot.prepare(self._agent, self._far.name, "WRITE", 0, end).post(message)

    def _run(self, plan: CopyPlan) -> None:
        assert self._pool is not None
        _core.paged_copy_host(self._pool, plan_tables(plan), False)

    def close(self) -> None:
        """Give everything back, but for what NIXL may still use."""
        self._pool = None
        if all([slot.release() for slot in self._slots]):
            self._staging.close()
        else:
            ABANDONED.append((self._staging, self._slots))
