"""Chunks of KV in the pages of one pool, the least used of which give way."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec


class Form(msgspec.Struct, frozen=True):
    """What LMCache must know of a chunk to make an object of it.

    Attributes:
        num_bytes: bytes of its page that are used.
        shape: of the tensor.
        dtype: LMCache's name of it.
        fmt: number of its ``MemoryFormat``.
    """

    num_bytes: int
    shape: list[int]
    dtype: str
    fmt: int


@dataclass(slots=True)
class Entry:
    """One chunk.

    Attributes:
        page: where it is.
        form: what it is.
        writer: who fills the page; empty once it is filled.
        readers: how often each reader holds it.
    """

    page: int
    form: Form
    writer: str = ""
    readers: Counter[str] = field(default_factory=Counter)

    @property
    def is_free(self) -> bool:
        """Whether the page may be used for another chunk."""
        return not self.writer and not self.readers


class PageStore:
    """Which chunk is in which page. Thread-safe; it touches no page itself."""

    def __init__(self, num_pages: int, on_drop: Callable[[str], None] | None = None) -> None:
        """All pages are free; ``on_drop`` is told of every chunk that was there and is no more."""
        self._on_drop = on_drop or (lambda key: None)
        self._free = list(range(num_pages - 1, -1, -1))
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # the least used first
        self._lock = threading.RLock()  # who is told of a drop may ask

    def __contains__(self, key: str) -> bool:
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and not entry.writer

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, key: str, form: Form, writer: str) -> int | None:
        """A page for ``writer`` to fill; None where the chunk is there, or no page gives way."""
        with self._lock:
            if key in self._entries:
                return None
            page = self._free_page()
            if page is not None:
                self._entries[key] = Entry(page, form, writer)
            return page

    def finish(self, key: str, writer: str, *, is_filled: bool) -> bool:
        """The writer is over; False where it was not its to fill."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not writer or entry.writer != writer:
                return False
            entry.writer = ""
            if not is_filled:
                self._drop(key, was_there=False)
            return True

    def hold(self, key: str, reader: str) -> Entry | None:
        """The chunk, which stays until ``reader`` lets go of it; None where it is not there."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.writer:
                return None
            entry.readers[reader] += 1
            self._entries.move_to_end(key)
            return entry

    def let_go(self, key: str, reader: str) -> bool:
        """Undo one :meth:`hold`; False where there is none."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.readers[reader]:
                return False
            entry.readers[reader] -= 1
            entry.readers = +entry.readers
            return True

    def drop(self, key: str) -> bool:
        """Forget a chunk that nobody reads or writes; False where there is none."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.is_free:
                return False
            self._drop(key)
            return True

    def forget(self, who: str) -> None:
        """Nothing more comes of a reader or writer: what it holds is let go of."""
        with self._lock:
            for key, entry in list(self._entries.items()):
                del entry.readers[who]
                if entry.writer == who:
                    self._drop(key, was_there=False)

    def keys(self) -> Collection[str]:
        """The chunks that are there."""
        with self._lock:
            return [key for key, entry in self._entries.items() if not entry.writer]

    def _free_page(self) -> int | None:
        if self._free:
            return self._free.pop()
        for key, entry in self._entries.items():
            if entry.is_free:
                self._drop(key)
                return self._free.pop()
        return None

    def _drop(self, key: str, *, was_there: bool = True) -> None:
        self._free.append(self._entries.pop(key).page)
        if was_there:
            self._on_drop(key)
