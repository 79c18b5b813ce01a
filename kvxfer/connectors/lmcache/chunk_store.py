"""Chunks of KV in host memory of this process, and in the stores of others; no LMCache in it."""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.closing import Closing
from kvxfer.connectors.lmcache.page_store import Entry, Form, PageStore
from kvxfer.connectors.lmcache.pool import PagePool
from kvxfer.connectors.lmcache.serving import LOOPBACK, serve
from kvxfer.connectors.lmcache.store_port import FarStore, StorePort, StoreRequests
from kvxfer.connectors.lmcache.wire import Hello
from kvxfer.errors import InvalidUsage, KvxferError
from kvxfer.memory import shared_empty
from kvxfer.session.requests import Writers

_log = logging.getLogger(__name__)
_PINNED = "pin"
Bytes: TypeAlias = NDArray[np.uint8]
Copies: TypeAlias = Literal["local", "peers"]


class ChunkStore(Closing):
    """One pool of chunks by name, served to peers. Thread-safe; a context manager."""

    def __init__(
        self,
        page_bytes: int,
        num_bytes: int,
        *,
        listen: str = "",
        peers: Sequence[str] = (),
        copies: Copies = "local",
        key_file: str | None = None,
        transport: str = "auto",
        num_threads: int | None = None,
        timeout_s: float = 10.0,
        move_timeout_s: float = 60.0,
        on_drop: Callable[[str], None] | None = None,
    ) -> None:
        """Hold as many chunks as fit.

        Args:
            page_bytes: of the largest chunk.
            num_bytes: of the pool.
            listen: ``host:port`` where other stores come; empty where none do.
            peers: where other stores listen.
            copies: ``peers``: what is put here is written to one of them too.
            key_file: the key that all of them hold; without one, whoever reaches the port is let
                in.
            transport: see `kvxfer.Endpoint`.
            num_threads: threads of copies; None = the measured best.
            timeout_s: limit of each question to a peer.
            move_timeout_s: limit of each copy to or from a peer.
            on_drop: is told of every chunk that gave way.

        Raises:
            InvalidUsage: no chunk fits, or an unusable host, transport or key file.
            NotAvailable: the port is taken, or the transport does not work here.
        """
        num_pages = num_bytes // page_bytes
        if not num_pages:
            raise InvalidUsage(f"a store of {num_bytes} bytes holds no chunk of {page_bytes}")
        # What lets go of a page has this store: where a copy is late, the memory outlives a close.
        self._memory: Bytes = shared_empty((num_pages, page_bytes))
        self._pages = PageStore(num_pages, on_drop)
        self._copies = copies
        self._names = (f"own-{number}" for number in itertools.count(1))
        self._pool = PagePool(
            self._memory.ctypes.data, self._memory.nbytes, page_bytes, is_device=False
        )
        holders: list[StoreRequests] = []

        def requests(writers: Writers) -> StoreRequests:
            holders.append(StoreRequests(self._pages, writers))
            return holders[-1]

        with ExitStack() as made:  # whatever fails gives back what was made, above all the pool
            made.callback(self._pool.close)
            self._endpoint = serve(
                self._pool,
                listen.rpartition(":")[0] or LOOPBACK,
                key_file=key_file,
                transport=transport,
                num_threads=num_threads,
                requests=requests,
            )
            made.callback(self._endpoint.close)
            own = Hello(addresses=self._endpoint.addresses)
            self._port: StorePort | None = None
            if listen:
                self._port = StorePort(listen, self._pages, page_bytes, own, *holders)
                made.callback(self._port.close)
            self._far = [
                FarStore(one, self._endpoint, self._pool, timeout_s, move_timeout_s)
                for one in peers
            ]
            made.pop_all()

    def __contains__(self, name: str) -> bool:
        return name in self._pages

    @property
    def num_pages(self) -> int:
        """Chunks that fit."""
        return self._pool.num_pages

    def put(self, name: str, form: Form, data: Bytes) -> bool:
        """Copy a chunk in; False where it is there, or no page gives way.

        Raises:
            InvalidUsage: more bytes than a page has.
        """
        self._require_fits(form)
        writer = next(self._names)
        page = self._pages.begin(name, form, writer)
        if page is not None:
            is_filled = False
            try:
                self._memory[page, : form.num_bytes] = data
                is_filled = True
            finally:
                self._pages.finish(name, writer, is_filled=is_filled)
        if self._copies == "peers" and self._far:
            self._copy_out(name)
        return page is not None

    def give(self, name: str, form: Form, data: Bytes) -> bool:
        """Write a chunk to a peer and keep none of it here; False where that peer does not have it
        then, and where the chunk is here already or no page gives way for it on its way.

        Raises:
            InvalidUsage: more bytes than a page has.
        """
        self._require_fits(form)
        writer = next(self._names)
        page = self._pages.begin(name, form, writer) if self._far else None
        if page is None:
            return False
        with ExitStack() as held:
            held.callback(lambda: self._pages.finish(name, writer, is_filled=False))
            self._memory[page, : form.num_bytes] = data
            far = self._far_of(name)
            try:
                return far.put([(name, page, form)], held) == 1 or far.has([name])[0]
            except KvxferError as error:
                _log.warning("a chunk is not stored at a peer: %s", error)
        return False

    def is_near(self, name: str) -> bool:
        """Whether a chunk is here, read from a peer if need be."""
        return name in self._pages or any(self._fetch(far, [name]) for far in self._far)

    def is_anywhere(self, name: str) -> bool:
        """Whether a chunk is here or at a peer; nothing is read."""
        return name in self._pages or any(self._has(far, name) for far in self._far)

    @contextmanager
    def reading(self, name: str) -> Iterator[tuple[Form, Bytes] | None]:
        """A chunk that is here, as long as the block runs; None where it is not."""
        reader = next(self._names)
        entry = self._pages.hold(name, reader)
        try:
            yield None if entry is None else (entry.form, self._bytes(entry))
        finally:
            if entry is not None:
                self._pages.let_go(name, reader)

    def pin(self, name: str) -> bool:
        """Keep a chunk that is here, until as many :meth:`unpin`."""
        return self._pages.hold(name, _PINNED) is not None

    def pin_all(self, names: Sequence[str]) -> tuple[set[str], set[str]]:
        """Pin the chunks that are here, and those that peers have, of each peer all at once.

        What is found is pinned before more is read, which would else take its pages.

        Returns:
            Those that were here, and those that were read from peers.
        """
        here = {name for name in names if self.pin(name)}
        came: set[str] = set()
        for far in self._far:
            missing = [name for name in names if name not in here and name not in came]
            if missing:
                self._fetch(far, missing)
                came.update(name for name in missing if self.pin(name))
        return here, came

    def unpin(self, name: str) -> bool:
        """Undo one pin; False where there is none."""
        return self._pages.let_go(name, _PINNED)

    def drop(self, name: str) -> bool:
        """Forget a chunk that nobody reads; False where there is none."""
        return self._pages.drop(name)

    def close(self) -> None:
        """End everything; may be called more than once."""
        if self._port is not None:
            self._port.close()
        for far in self._far:
            far.close()
        self._endpoint.close()
        self._pool.close()

    def _require_fits(self, form: Form) -> None:
        if not 0 < form.num_bytes <= self._pool.page_bytes:
            raise InvalidUsage(
                f"a chunk of {form.num_bytes} bytes; a page of this store has "
                f"{self._pool.page_bytes}"
            )

    def _far_of(self, name: str) -> FarStore:
        """The peer that a chunk is written to: the same one from every process."""
        return self._far[sum(name.encode()) % len(self._far)]

    def _bytes(self, entry: Entry) -> Bytes:
        return self._memory[entry.page, : entry.form.num_bytes]

    def _copy_out(self, name: str) -> None:
        far = self._far_of(name)
        reader = next(self._names)
        entry = self._pages.hold(name, reader)
        if entry is None:
            return
        with ExitStack() as held:
            held.callback(lambda: self._pages.let_go(name, reader))
            try:
                far.put([(name, entry.page, entry.form)], held)
            except KvxferError as error:
                _log.warning("a chunk is stored here alone: %s", error)

    def _fetch(self, far: FarStore, names: Sequence[str]) -> set[str]:
        """Read what a peer has of these and is not here; returns what came."""
        writer = next(self._names)
        came: set[str] = set()

        def take(name: str, form: Form) -> int | None:
            return self._pages.begin(name, form, writer)

        def end() -> None:
            for name in names:
                self._pages.finish(name, writer, is_filled=name in came)

        with ExitStack() as held:
            held.callback(end)
            try:
                came.update(far.fetch(names, take, held))
            except KvxferError as error:
                _log.warning("chunks are not fetched: %s", error)
        return came

    def _has(self, far: FarStore, name: str) -> bool:
        try:
            return far.has([name])[0]
        except KvxferError as error:
            _log.warning("a store is not asked: %s", error)
            return False


def page_bytes_of(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of a chunk of LMCache's ``kv_shape`` and torch dtype."""
    return math.prod(shape) * int(dtype.itemsize)
