"""The completion board: where the side that copies tells the other that data is visible.

The serving process owns the board, a shared segment of 64-byte slots. Each peer gets one slot and
stores growing sequence numbers in it, ordered after its data; the owner waits on the slot. Behind
the number the peer writes which process it is, so that the owner can tell slots of the dead. One
slot more says whether the cache behind the board still stands.
"""

import itertools
import os
import time
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvxfer import _core
from kvxfer.errors import NotAvailable, PeerLost, ProtocolMismatch
from kvxfer.memory.segment import create_segment
from kvxfer.memory.wire import Descriptor
from kvxfer.transport.process import ProcessSpec, ProcessWatch

NUM_SLOTS = 64
WITHDRAWN_SLOT = NUM_SLOTS  # not a peer's: it becomes 1 when the owner withdraws its cache
_NUM_FLAGS = NUM_SLOTS + 1
_NUM_BYTES = _NUM_FLAGS * _core.CompletionBoard.SLOT_BYTES
_IDENTITY = slice(1, 4)  # words of a slot that hold its peer's pid, start and pid namespace
_SLICE_S = 0.2
# A peer opens its slot right after it was told; one that has not by then never will.
_OPEN_WITHIN_S = 60.0
# In place of a pid: whoever had the slot is gone (csrc/ucx/server.cpp).
_PARTED = (1 << 64) - 1

_Spec = TypeVar("_Spec", bound=msgspec.Struct)


class _BoardSpec(msgspec.Struct, frozen=True):
    process: ProcessSpec
    fd: Descriptor
    num_bytes: Annotated[int, msgspec.Meta(ge=_NUM_BYTES, le=1 << 20)]
    slot: Annotated[int, msgspec.Meta(ge=0, lt=NUM_SLOTS)]


def slot_of(description: bytes) -> tuple[ProcessSpec, int]:
    """Whose board :meth:`Board.describe` spoke of, and which slot; nothing is opened.

    Raises:
        ProtocolMismatch: it is not what this version writes.
    """
    spec = decode_spec(description, _BoardSpec)
    return spec.process, spec.slot


class Board:
    """The owner's side: hands out slots and waits on them."""

    def __init__(self) -> None:
        self._segment = create_segment(_NUM_BYTES)
        self._flags = _core.CompletionBoard(self._segment.address, _NUM_FLAGS)
        self._words = _words(self._segment)
        self._free = list(range(NUM_SLOTS - 1, -1, -1))
        self._taken_at = [0.0] * NUM_SLOTS  # time.monotonic()
        self._pid = os.getpid()

    @property
    def address(self) -> int:
        """Where the slots lie in this process."""
        return self._segment.address

    @property
    def has_free_slot(self) -> bool:
        """Whether :meth:`take_slot` would give one."""
        return bool(self._free)

    def take_slot(self) -> int:
        """Reserve a slot for one peer.

        With none left, one goes again whose peer has died, or did not open it within a minute.

        Raises:
            NotAvailable: all are taken.
        """
        if not self._free:
            # One at a time, so that every other slot stays with whoever the caller gave it to.
            self._free.extend(itertools.islice(filter(self._is_abandoned, range(NUM_SLOTS)), 1))
        if not self._free:
            raise NotAvailable(f"{NUM_SLOTS} peers are linked, which is the limit; close one first")
        slot = self._free.pop()
        self._words[slot] = 0
        self._flags.signal(slot, 0)
        self._taken_at[slot] = time.monotonic()
        return slot

    def has_parted(self, slot: int) -> bool:
        """Whether the peer of ``slot`` was connected, and can store nothing here any more."""
        return int(self._words[slot, _IDENTITY][0]) == _PARTED

    def identity_of(self, slot: int) -> _core.ProcessIdentity | None:
        """The process that has opened ``slot``; None as long as none has."""
        pid, start_ticks, pid_namespace = (int(word) for word in self._words[slot, _IDENTITY])
        if not 0 < pid < 1 << 31:
            return None
        return _core.ProcessIdentity(pid, start_ticks, pid_namespace)

    def _is_abandoned(self, slot: int) -> bool:
        identity = self.identity_of(slot)
        if identity is None:
            return time.monotonic() - self._taken_at[slot] >= _OPEN_WITHIN_S  # never opened
        try:
            _core.require_same_process(identity)
        except PeerLost:
            return True
        except NotAvailable:
            pass
        return False

    def give_back(self, slot: int) -> None:
        """Return a slot whose peer is gone."""
        self._free.append(slot)

    def describe(self, slot: int) -> bytes:
        """Opaque bytes by which the peer of ``slot`` opens the board."""
        return msgspec.msgpack.encode(
            _BoardSpec(ProcessSpec.own(), self._segment.fd, self._segment.num_bytes, slot)
        )

    def wait(self, slot: int, sequence: int, *, timeout_s: float) -> bool:
        """Wait until the peer of ``slot`` has completed transfer ``sequence``."""
        deadline = time.monotonic() + timeout_s
        # In slices, because Python delivers signals (Ctrl-C) only between native calls.
        while True:
            left_s = deadline - time.monotonic()
            if self._flags.wait(slot, sequence, min(_SLICE_S, max(left_s, 0.0))):
                return True
            if left_s <= _SLICE_S:
                return False

    # For transports whose peers do not map the board.

    def occupy(self, slot: int, process: ProcessSpec) -> None:
        """Note which process the peer of ``slot`` is."""
        identity = (process.pid, process.start_ticks, process.pid_namespace)
        self._words[slot, _IDENTITY] = identity

    def vacate(self, slot: int) -> None:
        """Note that the peer of ``slot`` has left, or its process has ended: see `has_parted`."""
        self._words[slot, _IDENTITY] = (_PARTED, 0, 0)

    def sequence(self, slot: int) -> int:
        """The last transfer that the peer of ``slot`` has completed; 0 for none."""
        return self._flags.load(slot)

    def complete(self, slot: int, sequence: int) -> None:
        """Say that transfer ``sequence`` of ``slot`` is visible."""
        self._flags.signal(slot, sequence)

    @property
    def is_withdrawn(self) -> bool:
        """Whether :meth:`withdraw` was called."""
        return bool(self._flags.load(WITHDRAWN_SLOT))

    def withdraw(self) -> None:
        """Tell every peer that the cache is closed: what they post from now on is refused."""
        if os.getpid() != self._pid:
            return  # a forked child: the cache is its parent's, and open
        self._flags.signal(WITHDRAWN_SLOT, 1)


class PeerSlot:
    """The copying side: one slot of the peer's board and the sequence it has reached."""

    def __init__(self, description: bytes) -> None:
        spec = decode_spec(description, _BoardSpec)
        spec.process.require_alive()
        self._watch = ProcessWatch(spec.process.identity())
        self._segment = _core.SharedSegment.open(spec.process.pid, spec.fd, spec.num_bytes)
        self.process = spec.process
        self.slot = spec.slot
        self.address = self._segment.address
        self.num_slots = spec.num_bytes // _core.CompletionBoard.SLOT_BYTES
        self._flags = _core.CompletionBoard(self.address, self.num_slots)
        own = ProcessSpec.own()
        _words(self._segment)[self.slot, _IDENTITY] = own.pid, own.start_ticks, own.pid_namespace
        self._sequence = self._flags.load(self.slot)

    @property
    def sequence(self) -> int:
        """The number of the last transfer; 0 for none."""
        return self._sequence

    def require_open(self) -> None:
        """Check that the peer lives and still stands by its cache.

        Raises:
            PeerLost: it ended, its id belongs to another process, or it withdrew the cache.
        """
        self._watch.require_alive()
        if self._flags.load(WITHDRAWN_SLOT):
            raise PeerLost(
                f"process {self.process.pid} has closed the cache of this link; connect again once "
                "it serves another"
            )

    def next_sequence(self) -> int:
        """The number of the next transfer; calls from several threads must be serialised."""
        self._sequence += 1
        return self._sequence

    def give_back_sequence(self) -> None:
        """Take back the last :meth:`next_sequence`, of a transfer that was never started."""
        self._sequence -= 1

    def signal(self, sequence: int) -> None:
        """Publish ``sequence`` after every earlier store of this thread."""
        self._flags.signal(self.slot, sequence)


def _words(segment: _core.SharedSegment) -> NDArray[np.uint64]:
    """The board as words, ``[slots, words of a slot]``."""
    words: NDArray[np.uint64] = np.frombuffer(segment, np.uint64)  # type: ignore[call-overload]
    slot_words = _core.CompletionBoard.SLOT_BYTES // 8
    return words[: words.size // slot_words * slot_words].reshape(-1, slot_words)


def decode_spec(data: bytes, kind: type[_Spec]) -> _Spec:
    """Decode a transport's own metadata.

    Raises:
        ProtocolMismatch: it is not what this version writes.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolMismatch(
            f"{len(data)} bytes are not the metadata of a {kind.__name__}: {error}"
        ) from error
