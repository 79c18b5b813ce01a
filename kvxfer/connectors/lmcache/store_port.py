"""How one store asks another for chunks, or for pages to put chunks in."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvxfer.connectors.lmcache.greeting import calling
from kvxfer.connectors.lmcache.lane import Job, Lane, hold_until_over
from kvxfer.connectors.lmcache.page_store import Form, PageStore
from kvxfer.connectors.lmcache.pool import PagePool, Pages
from kvxfer.connectors.lmcache.ports import PortServer
from kvxfer.connectors.lmcache.wire import MAX_KEYS, Hello, decode, encode
from kvxfer.control import (
    AbortRequest,
    CommitRequest,
    ReserveReply,
    ReserveRequest,
)
from kvxfer.errors import (
    ControlTimeout,
    InvalidUsage,
    KvxferError,
    PeerLost,
    ProtocolMismatch,
    TransferTimeout,
)
from kvxfer.session import Endpoint, Peer
from kvxfer.session.requests import GivesUpNothing, Writers, refused
from kvxfer.transport import Op, Tuning

_log = logging.getLogger(__name__)
_CHECK_S = 1.0
_LEFT_ALONE_S = 3.0
_Keys = Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=MAX_KEYS)]
_Name = Annotated[str, Meta(max_length=256)]


class Ask(msgspec.Struct, frozen=True, tag=True):
    """``find`` and hold chunks, ``reserve`` pages for them, or end either."""

    kind: Literal["hello", "has", "find", "reserve", "end_read", "end_write", "drop_write"]
    who: _Name
    keys: _Keys = []
    forms: Annotated[list[Form], Meta(max_length=MAX_KEYS)] = []


class Tell(msgspec.Struct, frozen=True, tag=True):
    """The page of each key, -1 where there is none; for an end, 0 where it was held.

    Attributes:
        error: why the question is refused; empty where it is not.
    """

    pages: Annotated[list[int], Meta(max_length=MAX_KEYS)] = []
    forms: Annotated[list[Form | None], Meta(max_length=MAX_KEYS)] = []
    hello: Hello | None = None
    error: Annotated[str, Meta(max_length=4096)] = ""


class StorePort(PortServer):
    """Answers other stores for this one."""

    def __init__(
        self,
        host_and_port: str,
        store: PageStore,
        page_bytes: int,
        own: Hello,
        holders: "StoreRequests",
    ) -> None:
        """Bind ``host:port`` and serve.

        Args:
            host_and_port: where.
            store: whose chunks.
            page_bytes: of its pages.
            own: who this side is.
            holders: sees that what is held ends with who holds it.

        Raises:
            NotAvailable: the port cannot be bound.
        """
        super().__init__(host_and_port, "kvxfer-lmcache-store")
        self._store, self._page_bytes, self._own = store, page_bytes, own
        self._holders = holders
        self.start()

    def answer(self, sender: str, message: bytes, reply: Callable[[bytes], None]) -> None:
        """Answer one message; one that is none of the protocol gets no answer."""
        reply(encode(self._answer(decode(message, Ask))))

    def _answer(self, ask: Ask) -> Tell:
        if ask.kind == "hello":
            return Tell(hello=self._own)
        if ask.kind == "has":
            return Tell([0 if key in self._store else -1 for key in ask.keys])
        try:
            with self._holders.holding(ask.who):
                return self._hold(ask)
        except KvxferError as error:
            nothing = len(ask.keys)
            return Tell([-1] * nothing, [None] * nothing, error=str(error))

    def _hold(self, ask: Ask) -> Tell:
        if ask.kind == "find":
            found = [self._store.hold(key, ask.who) for key in ask.keys]
            return Tell(
                [-1 if one is None else one.page for one in found],
                [None if one is None else one.form for one in found],
            )
        if ask.kind == "reserve":
            if len(ask.forms) != len(ask.keys):
                raise InvalidUsage(
                    f"{len(ask.keys)} chunks of {len(ask.forms)} forms; give one for each"
                )
            chunks = zip(ask.keys, ask.forms, strict=True)
            return Tell([self._reserve(key, form, ask.who) for key, form in chunks])
        return Tell([-1 + self._end(ask.kind, key, ask.who) for key in ask.keys])

    def _reserve(self, key: str, form: Form, who: str) -> int:
        if not 0 < form.num_bytes <= self._page_bytes:
            return -1
        page = self._store.begin(key, form, who)
        return -1 if page is None else page

    def _end(self, kind: str, key: str, who: str) -> bool:
        if kind == "end_read":
            return self._store.let_go(key, who)
        return self._store.finish(key, who, is_filled=kind == "end_write")


class StoreRequests(GivesUpNothing):
    """Frees what a store held of which nothing more can come; grants nothing itself."""

    def __init__(self, store: PageStore, writers: Writers) -> None:
        """Of the endpoint that ``writers`` is."""
        super().__init__()
        self._store, self._writers = store, writers
        self._holders: set[str] = set()  # who may hold something
        # Held while somebody takes something and while it is let go of: nobody takes after its end.
        self._lock = threading.Lock()

    @contextmanager
    def holding(self, connection: str) -> Iterator[None]:
        """A block in which a connection takes what is let go of at its end.

        Raises:
            PeerLost: it has ended, or never was.
        """
        with self._lock:
            if self._writers.has_ended(connection):
                raise PeerLost(
                    f"connection {connection!r} is not known here; connect to this store first"
                )
            self._holders.add(connection)
            yield

    def reserve(self, request: ReserveRequest) -> ReserveReply:
        """Refused: the store's own port grants pages."""
        return refused(request.request_id, "ask the store's own port")

    def commit(self, request: CommitRequest) -> None:
        """Nothing was granted here."""

    def abort(self, request: AbortRequest) -> None:
        """Nothing was granted here."""

    def left(self, connection: str) -> None:
        """It reads and writes no more."""
        super().left(connection)
        with self._lock:
            # It stays a holder until its end is seen: a question of it may be under way.
            self._store.forget(connection)

    def gone(self, connection: str) -> None:
        """Its control connection has ended; it may read and write on."""

    def tick(self, now_s: float) -> float:
        """Look who has ended, and tell who watches that this side lives."""
        tell_s = super().tick(now_s)
        for connection in list(self._holders):
            with self._lock:
                if self._writers.has_ended(connection):
                    self._holders.discard(connection)
                    self._store.forget(connection)
        return min(now_s + _CHECK_S, tell_s)


class FarStore:
    """Another engine's store. Thread-safe; every call is bounded.

    One that is late ends with an error, and its pages are held until nobody moves them any more.
    """

    def __init__(
        self, url: str, endpoint: Endpoint, pool: PagePool, timeout_s: float, move_timeout_s: float
    ) -> None:
        """The one that answers at ``url`` (host:port), which is met when it is first needed.

        A question takes ``timeout_s`` at most, a copy ``move_timeout_s``.
        """
        self._url, self._pool = url, pool
        self._timeout_s, self._move_timeout_s = timeout_s, move_timeout_s
        self._left_alone_until_s = 0.0
        self._late: Future[int] | None = None  # what moves on though nobody waits for it
        self._lane = Lane(url, endpoint, self._greet, tuning=Tuning(), connect_timeout_s=timeout_s)

    def fetch(
        self, keys: Sequence[str], take: Callable[[str, Form], int | None], held: ExitStack
    ) -> list[str]:
        """Read chunks into the pages that ``take`` gives; returns the keys that came.

        ``held`` lets go of the pages. Where they are late it is emptied, and that done later.

        Raises:
            KvxferError: the store is gone, does not answer, or is late.
        """
        peer = self._meet()
        found = self._ask(peer, "find", keys)
        there = [
            (key, page, form)
            for key, page, form in zip(keys, found.pages, found.forms, strict=True)
            if page >= 0 and form is not None
        ]
        names = [key for key, *_ in there]
        try:
            wanted = [
                (key, near, far, form.num_bytes)
                for key, far, form in there
                if (near := take(key, form)) is not None
            ]
            self._move(peer, wanted, Op.GET, held)
        except BaseException:
            self._give_back(peer, "end_read", names)
            raise
        # Not there any more means that the page may have been written while it was read.
        ended = self._ask(peer, "end_read", names).pages
        valid = {key for key, page in zip(names, ended, strict=True) if page == 0}
        return [key for key, *_ in wanted if key in valid]

    def put(self, chunks: Sequence[tuple[str, int, Form]], held: ExitStack) -> int:
        """Write chunks (key, page here, form) that the store lacks; returns how many.

        For ``held`` and errors see :meth:`fetch`.
        """
        keys = [key for key, *_ in chunks]
        peer = self._meet()
        pages = self._ask(peer, "reserve", keys, [form for *_, form in chunks]).pages
        wanted = [
            (key, near, far, form.num_bytes)
            for (key, near, form), far in zip(chunks, pages, strict=True)
            if far >= 0
        ]
        names = [key for key, *_ in wanted]
        try:
            self._move(peer, wanted, Op.PUT, held)
        except BaseException:
            self._give_back(peer, "drop_write", names)
            raise
        return sum(page == 0 for page in self._ask(peer, "end_write", names).pages)

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Which chunks are there.

        Raises:
            KvxferError: the store is gone, or does not answer.
        """
        return [page == 0 for page in self._ask(self._meet(), "has", keys).pages]

    def close(self) -> None:
        """End what is in flight; may be called more than once."""
        self._lane.close()

    def _move(
        self, peer: Peer, pieces: Sequence[tuple[str, int, int, int]], op: Op, held: ExitStack
    ) -> None:
        if not pieces:
            return
        pages = Pages(
            [near for _, near, _, _ in pieces],
            [far for _, _, far, _ in pieces],
            [num_bytes for *_, num_bytes in pieces],
        )
        job = Job(
            lambda *far: self._pool.plan(pages, op, *far),
            len(pieces),
            op,
            granted_to=peer,  # with that connection they are let go of
        )
        self._lane.submit(job)
        if wait([job.done], self._move_timeout_s).done:
            job.done.result()
            return
        # What was taken over there ends with the connection, and that once nothing moves.
        self._lane.distrust(peer)
        hold_until_over(job.done, held.pop_all().close)
        if not job.done.done():
            self._late = job.done
        raise TransferTimeout(
            f"{len(pieces)} chunks were not moved to or from the store at {self._url} within "
            f"{self._move_timeout_s:g} s; their pages stay until they are"
        )

    def _give_back(self, peer: Peer, kind: str, keys: Sequence[str]) -> None:
        """Let go of what was taken, unless it ends with the connection."""
        if self._lane.holds(peer):
            self._ask(peer, kind, keys)

    def _meet(self) -> Peer:
        """The connection of one exchange: what it takes is its own, and ends with it."""
        self._require_answering()
        return self._lane.connect()

    def _ask(self, peer: Peer, kind: str, keys: Sequence[str], forms: Sequence[Form] = ()) -> Tell:
        if not keys:
            return Tell()
        try:
            if not self._lane.holds(peer):
                raise PeerLost(f"the connection to {self._url} has ended, and what it held with it")
            ask = Ask(kind, peer.connection, list(keys), list(forms))  # type: ignore[arg-type]
            tell = self._call(ask)
            _require_answer(tell, ask, self._url)
        except KvxferError:
            # What was taken, or was not given back for want of an answer, ends with the connection.
            self._lane.distrust(peer)
            raise
        return tell

    def _greet(self) -> Hello:
        hello = self._call(Ask("hello", "")).hello
        if hello is None:
            raise ProtocolMismatch(f"{self._url} answers, but is no store of kvxfer")
        return hello

    def _require_answering(self) -> None:
        if self._late is not None and not self._late.done():
            raise TransferTimeout(
                f"chunks of before still move to or from the store at {self._url}; it is asked "
                "again once they do not"
            )
        # Each question to one that is gone costs all of its limit, and chunks come by the dozen.
        left_s = self._left_alone_until_s - time.monotonic()
        if left_s > 0:
            raise PeerLost(
                f"the store at {self._url} did not answer; it is asked again in {left_s:.1f} s"
            )

    def _call(self, ask: Ask) -> Tell:
        try:
            with calling(self._url, self._timeout_s) as caller:
                return decode(caller.call(encode(ask)), Tell)
        except ControlTimeout as error:
            self._left_alone_until_s = time.monotonic() + _LEFT_ALONE_S
            raise ControlTimeout(
                f"no store answered at {self._url} within {self._timeout_s:g} s; start it, or "
                "check the addresses of the peers"
            ) from error


def _require_answer(tell: Tell, ask: Ask, url: str) -> None:
    if tell.error:
        raise PeerLost(f"the store at {url} refuses: {tell.error}")
    wanted = len(ask.keys)
    num_forms = len(tell.forms) if ask.kind == "find" else wanted
    if (len(tell.pages), num_forms) != (wanted, wanted):
        raise ProtocolMismatch(
            f"the store at {url} answers {wanted} keys with {len(tell.pages)} pages and "
            f"{len(tell.forms)} forms; run the same release on both sides"
        )
