"""The right to move bytes in a range of memory.

One table a process: a range is registered once or shared (the same range again raises a count), and
ranges that overlap otherwise are refused, because two owners of one page is how pages get lost.
"""

import threading
from dataclasses import replace
from typing import Any

from kvxfer import _core
from kvxfer.closing import Closing
from kvxfer.errors import RegistrationError
from kvxfer.memory.buffer import Buffer, MemoryKind, as_buffer


class _Entry:
    __slots__ = ("buffer", "buffer_id", "count")

    def __init__(self, buffer: Buffer, buffer_id: int) -> None:
        self.buffer = buffer
        self.buffer_id = buffer_id
        self.count = 0


class _Table:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[MemoryKind, int, int], _Entry] = {}

    def acquire(self, buffer: Buffer) -> _Entry:
        key = (buffer.kind, buffer.address, buffer.num_bytes)
        buffer_id = _live_buffer_id(buffer)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.buffer_id != buffer_id:
                raise RegistrationError(
                    f"{_span(buffer)} was freed and allocated anew while it was registered; close "
                    "the old registration first"
                )
            if entry is None:
                self._refuse_overlap(buffer)
                entry = self._entries[key] = _Entry(buffer, buffer_id)
            entry.count += 1
            return entry

    def release(self, entry: _Entry) -> None:
        buffer = entry.buffer
        with self._lock:
            entry.count -= 1
            if entry.count == 0:
                del self._entries[(buffer.kind, buffer.address, buffer.num_bytes)]

    def _refuse_overlap(self, buffer: Buffer) -> None:
        for entry in self._entries.values():
            other = entry.buffer
            if other.kind is not buffer.kind:
                continue
            if buffer.address < other.end and other.address < buffer.end:
                raise RegistrationError(
                    f"{_span(buffer)} overlaps the registered {_span(other)}; register the whole "
                    "range once, or close the other registration first"
                )


_TABLE = _Table()


def _span(buffer: Buffer) -> str:
    return f"{buffer.kind.value} memory [{buffer.address:#x}, {buffer.end:#x})"


def _live_buffer_id(buffer: Buffer) -> int:
    """CUDA's id of the allocation, unique for the life of the process; 0 for host memory."""
    if buffer.kind is MemoryKind.HOST:
        return 0
    return _core.buffer_id(buffer.address)


class Registration(Closing):
    """A registered range. A context manager; ``close`` may be called more than once."""

    def __init__(self, entry: _Entry) -> None:
        self._entry: _Entry | None = entry
        self._buffer = entry.buffer

    @property
    def buffer(self) -> Buffer:
        """The registered range."""
        return self._buffer

    @property
    def closed(self) -> bool:
        """Whether the right has been given back."""
        return self._entry is None

    def require_live(self) -> None:
        """Check that the range may be used.

        Raises:
            RegistrationError: closed, or the device memory behind it was freed or replaced.
        """
        if self._entry is None:
            raise RegistrationError(f"{_span(self._buffer)} is no longer registered")
        if _live_buffer_id(self._buffer) != self._entry.buffer_id:
            raise RegistrationError(
                f"{_span(self._buffer)} was freed and allocated anew since it was registered; "
                "register it again"
            )

    def close(self) -> None:
        """Give the right back and let go of the array."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._buffer = replace(self._buffer, owner=None)
            _TABLE.release(entry)


def register(array: Any) -> Registration:
    """Register the memory of a contiguous array (numpy, torch, cupy, or a core buffer).

    The registration keeps the array alive. Registering the same range again shares it.

    Raises:
        InvalidUsage: not a contiguous, writable CPU or CUDA array.
        RegistrationError: the range overlaps another registration, or its memory is dead.
    """
    return Registration(_TABLE.acquire(as_buffer(array)))
