"""Pages on their way into a receiver's pool: who may write them, and when their keys are hits.

LMCache makes a key a hit when its page is reserved, before a byte is there. Here a page is granted
to one sender, and its key becomes a hit when that sender has committed the grant and its bytes are
there. A sender commits while they are on their way, naming the transfer that brings them: whether
that has ended stands on this side's board, so a commit and the copy take no longer than the longer
of the two. A grant ends once: filled, by abort, or because no store of its sender can come any
more. Only then is the page used again.
"""

import itertools
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from kvxfer.connectors.lmcache.awaited import Ended
from kvxfer.connectors.lmcache.interface import Shelf
from kvxfer.connectors.lmcache.promises import Granted, Request, Waiting, owner_of, refused
from kvxfer.connectors.lmcache.wire import AllocRequest, AllocResponse, CancelNotif, Grant
from kvxfer.control import (
    AbortRequest,
    CommitRequest,
    ReserveReply,
    ReserveRequest,
)
from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable, PeerLost
from kvxfer.session.requests import GivesUpNothing, Writers

_log = logging.getLogger(__name__)
# A grant whose sender has not connected by then will not be written.
_ORPHAN_S = 60.0
_CHECK_S = 1.0
_MAX_UNTOLD = 4096  # of an engine whose scheduler does not ask
_MAX_WAITING = 4096  # who asks behind them gets pages at once or none


class Arrivals(GivesUpNothing):
    """The grants of one receiver. Thread-safe; it answers the alloc channel of its endpoint too."""

    def __init__(self, shelf: Shelf, *, lease_s: float, wait_s: float) -> None:
        """Of the pages on ``shelf``.

        Args:
            shelf: where pages come from and hits go.
            lease_s: how long a hit that nobody fetches, and a promise that nobody takes up, is kept
                where its pages are needed.
            wait_s: how long a request may wait for pages.
        """
        super().__init__()
        self._shelf, self._lease_s, self._wait_s = shelf, lease_s, wait_s
        self._writers: Writers | None = None
        self._incarnation = ""
        self._requests: dict[tuple[str, str], Request] = {}
        self._granted: dict[str, Granted] = {}
        self._coming: dict[str, int] = {}  # of these, committed: the transfer that fills each
        self._waiting: list[Waiting] = []
        self._over: deque[tuple[str, bool]] = deque(maxlen=_MAX_UNTOLD)
        self._lapsed: deque[tuple[str, str]] = deque(maxlen=_MAX_UNTOLD)  # owners
        self._ids = (f"{uuid.uuid4().hex[:12]}-{number}" for number in itertools.count(1))
        self._lock = threading.RLock()

    def of(self, writers: Writers) -> "Arrivals":
        """Itself, as what answers the endpoint that ``writers`` is."""
        self._writers = writers
        self._incarnation = writers.incarnation
        return self

    @property
    def has_waiting(self) -> bool:
        """Whether :meth:`serve_waiting` may have something to do soon."""
        return bool(self._waiting)

    # What senders ask on LMCache's alloc port.

    def ask(
        self, sender: str, message: AllocRequest, reply: Callable[[AllocResponse], None]
    ) -> None:
        """Answer now, or once there are pages; of a request all pages are promised at once.

        Behind too many who wait, nobody waits.
        """
        with self._lock:
            self._waiting.append(Waiting(sender, message, reply, self._limit_s(message)))
            self.serve_waiting()

    def serve_waiting(self) -> None:
        """Answer who waits, as far as there are pages, first come first served."""
        with self._lock:
            self.publish_arrived()
            now_s = time.monotonic()
            for one in list(self._waiting):
                answer = self._answer(one, now_s)
                if answer is not None:
                    self._waiting.remove(one)
                    if -1 in answer.remote_indexes:
                        self._note_end(one.message.req_id, has_all=False)
                    one.reply(answer)

    def cancel(self, sender: str, message: CancelNotif) -> None:
        """Forget a sender's request; pages that it may be writing go once it commits or aborts."""
        with self._lock:
            self._waiting = [
                one
                for one in self._waiting
                if owner_of(one.sender, one.message) != owner_of(sender, message)
            ]
            request = self._requests.get(owner_of(sender, message))
            if request is not None:
                self._give_up(request)
            self._note_end(message.req_id, has_all=False)

    # What the endpoint of this side is told by the senders' endpoints.

    def reserve(self, request: ReserveRequest) -> ReserveReply:
        """Refused: LMCache's alloc port grants pages."""
        return ReserveReply(
            request_id=request.request_id,
            state="refused",
            reason="pages of an LMCache pool are granted on its alloc port",
        )

    def commit(self, request: CommitRequest) -> None:
        """Make the keys of a grant hits, as soon as the transfer that it names has ended.

        Raises:
            InvalidUsage: no such grant of this connection; nothing is a hit then.
        """
        with self._lock:
            if self._open_grant(request.request_id, request.incarnation) is None:
                raise InvalidUsage(
                    f"grant {request.request_id!r} of {request.incarnation!r} is not open; it was "
                    "ended before"
                )
            self._coming[request.request_id] = request.sequence
            self.publish_arrived()

    def abort(self, request: AbortRequest) -> None:
        """Take the pages of a grant back; the sender writes them no more."""
        with self._lock:
            granted = self._ended(request.request_id, request.incarnation)
            if granted is not None:
                self._take_back(granted)

    def publish_arrived(self) -> None:
        """Make hits of what has arrived; to be called before any look at hits."""
        if not self._coming:  # so that it costs nothing most of the time
            return
        with self._lock:
            for grant, sequence in list(self._coming.items()):
                of, writers = self._granted[grant].request.connection, self._writers
                if writers is not None and writers.has_completed(of, sequence):
                    self._publish(grant)

    def take_ended(self) -> Ended:
        """The requests that are over since the last call, by their senders' ids."""
        with self._lock:
            self.publish_arrived()
            over = dict.fromkeys(self._over)  # what is refused is lost twice where it had pages
            self._over.clear()
        return Ended(
            tuple(request for request, has_all in over if has_all),
            tuple(request for request, has_all in over if not has_all),
        )

    def left(self, connection: str) -> None:
        """Every store of the connection is over."""
        super().left(connection)
        with self._lock:
            self.publish_arrived()
            self._end_all(connection)

    def gone(self, connection: str) -> None:
        """Its control connection has ended; whoever had it may write on."""
        if self._writers is not None and self._writers.has_ended(connection):
            self.left(connection)

    def tick(self, now_s: float) -> float:
        """Look for senders that have died, and tell who watches that this side lives."""
        tell_s = super().tick(now_s)
        with self._lock:
            for connection in {one.connection for one in self._requests.values()} - {""}:
                if self._is_dead(connection, now_s):
                    self.left(connection)  # after a look at what has arrived
        return min(now_s + _CHECK_S, tell_s)

    # Inside the lock.

    def _limit_s(self, message: AllocRequest) -> float:
        """How long a batch may wait: pages that its sender does not expect any more stay its."""
        if len(self._waiting) >= _MAX_WAITING:
            return 0.0
        asker_s = 0.0 if message.kvxfer is None else message.kvxfer.wait_s
        return min(self._wait_s, asker_s or self._wait_s)

    def _publish(self, grant: str) -> None:
        granted = self._granted[grant]
        owner = granted.request
        for key, page in granted.pages:
            if owner.is_cancelled:
                self._shelf.give_back(page)
            else:
                self._shelf.publish(key, page)
                owner.keys.append(key)
        # Last: as long as it is coming, who looks for a key waits for all of them.
        self._ended(grant, owner.connection)
        self._settle(owner)

    def _answer(self, one: Waiting, now_s: float) -> AllocResponse | None:
        """What is answered, None while there are no pages; no error, for those who ask behind."""
        try:
            return self._try(one, now_s)
        except Exception as error:
            is_known = isinstance(error, KvxferError)
            _log.warning("request %r: %s", one.message.req_id, error, exc_info=not is_known)
            request = self._requests.get(owner_of(one.sender, one.message))
            if request is not None:
                self._give_up(request)
            return refused(one.message, str(error) or type(error).__name__)

    def _try(self, one: Waiting, now_s: float) -> AllocResponse | None:
        message = one.message
        owner = owner_of(one.sender, message)
        request = self._requests.get(owner)
        if owner in self._lapsed:
            if message.is_last_batch:
                self._lapsed.remove(owner)  # the next of that name is another
            raise InvalidUsage(
                f"request {message.req_id!r} rested for more than {self._lease_s} s while others "
                "waited, and has lost its pages; raise kvxfer.lease_s"
            )
        if request is None:
            wanted = max(message.total_chunks, len(message.keys))
            if wanted > self._shelf.num_pages:
                raise InvalidUsage(
                    f"request {message.req_id!r} needs {wanted} pages of a pool of "
                    f"{self._shelf.num_pages}; raise pd_buffer_size at the receiver"
                )
            if not self._have(wanted, now_s):
                if now_s < one.asked_s + one.limit_s:
                    return None
                raise NotAvailable(
                    f"no {wanted} pages were free within {one.limit_s} s, with "
                    f"{len(self._waiting) - 1} others waiting; raise pd_buffer_size at the "
                    "receiver, or kvxfer.alloc_timeout_s on both sides"
                )
            request = self._admit(one, wanted)
        elif len(message.keys) > request.promised:
            raise InvalidUsage(
                f"request {message.req_id!r} asks for {len(message.keys)} pages more, of which "
                f"{request.promised} are promised; total_chunks was too low"
            )
        request.asked_s = now_s
        return self._grant(request, message)

    def _have(self, wanted: int, now_s: float) -> bool:
        """Whether that many pages are neither taken nor promised, if need be after a clean-up."""
        requests = self._requests
        while self._shelf.num_free() - sum(one.promised for one in requests.values()) < wanted:
            if not (self._drop_idle(now_s) or self._shelf.drop_unread(self._lease_s)):
                return False
        return True

    def _drop_idle(self, now_s: float) -> bool:
        """Give up a request that has not taken up its promise in time; False if none."""
        # A prefill that is aborted half way tells nobody, and its sender lives on.
        for request in self._requests.values():
            if request.promised and now_s - request.asked_s >= self._lease_s:
                self._lapsed.append(request.owner)
                self._give_up(request)
                return True
        return False

    def _admit(self, one: Waiting, wanted: int) -> Request:
        message = one.message
        connection = "" if message.kvxfer is None else message.kvxfer.connection
        owner = owner_of(one.sender, message)
        return self._requests.setdefault(owner, Request(owner, connection, wanted))

    def _grant(self, request: Request, message: AllocRequest) -> AllocResponse:
        pages, already = self._take(request, message)
        request.promised -= len(message.keys)
        # One batch alone comes from who does not name the request.
        request.is_complete = message.is_last_batch or not message.req_id
        if request.is_complete:
            request.promised = 0
        grant = self._open(request, message, pages)
        self._settle(request)
        return AllocResponse(
            remote_indexes=[self._shelf.number(page) for _, page in pages],
            already_sent_indexes=already,
            kvxfer=grant,
        )

    def _take(
        self, request: Request, message: AllocRequest
    ) -> tuple[list[tuple[str, Any]], list[int]]:
        """A page for each key that is no hit, and the indexes of hits; or an error, and no page."""
        pages: list[tuple[str, Any]] = []
        already: list[int] = []
        try:
            for index, key in enumerate(message.keys):
                if self._shelf.hold(key):
                    already.append(index)
                    request.keys.append(key)
                    continue
                page = self._shelf.take(message, index)
                if page is None:
                    raise InvalidUsage(f"no page for key {index} of {len(message.keys)}")
                pages.append((key, page))
        except Exception:
            for _, page in pages:
                self._shelf.give_back(page)
            raise
        return pages, already

    def _open(
        self, request: Request, message: AllocRequest, pages: list[tuple[str, Any]]
    ) -> Grant | None:
        if message.kvxfer is None:
            # LMCache's own channel says nothing when the bytes are there, so its rule holds.
            for key, page in pages:
                self._shelf.publish(key, page)
                request.keys.append(key)
            return None
        if not pages:
            return Grant(incarnation=self._incarnation)
        grant = Grant(id=next(self._ids), incarnation=self._incarnation)
        self._granted[grant.id] = Granted(request, pages, time.monotonic())
        request.grants.add(grant.id)
        return grant

    def _open_grant(self, grant: str, connection: str) -> Granted | None:
        """What is granted to ``connection`` under that id."""
        granted = self._granted.get(grant)
        return granted if granted and granted.request.connection == connection else None

    def _ended(self, grant: str, connection: str) -> Granted | None:
        """The same, which is over now."""
        granted = self._open_grant(grant, connection)
        if granted is not None:
            granted.request.grants.discard(grant)
            self._coming.pop(grant, None)
            del self._granted[grant]
        return granted

    def _take_back(self, granted: Granted) -> None:
        for _, page in granted.pages:
            self._shelf.give_back(page)
        self._give_up(granted.request)

    def _give_up(self, request: Request) -> None:
        """Nothing more is published for it, and it fetches nothing."""
        request.is_cancelled = request.is_complete = True
        request.promised = 0
        keys, request.keys = request.keys, []
        for key in keys:
            self._shelf.drop(key)
        self._settle(request)

    def _settle(self, request: Request) -> None:
        """Forget a request of which nothing more can come."""
        is_over = request.is_complete and not request.grants
        if is_over and self._requests.pop(request.owner, None) is not None:
            self._note_end(request.owner[1], has_all=not request.is_cancelled)

    def _note_end(self, req_id: str, *, has_all: bool) -> None:
        if req_id:  # who sends without one is not waited for
            self._over.append((req_id, has_all))

    def _end_all(self, connection: str) -> None:
        for request in [one for one in self._requests.values() if one.connection == connection]:
            for grant in list(request.grants):
                granted = self._ended(grant, connection)
                if granted is not None:
                    self._take_back(granted)
            self._give_up(request)

    def _is_dead(self, connection: str, now_s: float) -> bool:
        if self._writers is None or not self._writers.has_ended(connection):
            return False
        try:
            self._writers.shares_of(connection)
        except PeerLost:
            # It has not met this endpoint: a sender that still knows the one before.
            opened = [
                one.at_s for one in self._granted.values() if one.request.connection == connection
            ]
            return now_s - max(opened, default=0.0) > _ORPHAN_S
        return True
