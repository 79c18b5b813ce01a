"""All that goes to one peer, in order, on a thread of its own: a slow peer delays no other."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from kvxfer.closing import Closing
from kvxfer.connectors.lmcache.wire import Grant, Hello
from kvxfer.errors import InvalidUsage, KvxferError, PeerLost, TransferTimeout
from kvxfer.layout import CopyPlan
from kvxfer.session import Endpoint, Peer
from kvxfer.transport import After, Op, Transfer, Tuning

_log = logging.getLogger(__name__)
_SLICE_S = 0.2
_JOIN_S = 30.0


@dataclass(slots=True)
class Job:
    """One batch of pages.

    Attributes:
        plan: what is moved, given where the peer's pool lies and how many pages it has.
        count: how many pages that is.
        op: to the peer or from it.
        grant: what a write fills; None where pages were not granted by a kvxfer receiver.
        granted_to: the connection by which they were asked for: with it the grant ends, and its
            pages may be somebody else's. None without a grant.
        after: what the source must have reached.
        done: the number of pages once they are visible; an exception means that nobody writes or
            reads them any more.
    """

    plan: Callable[[int, int], CopyPlan]
    count: int
    op: Op
    grant: Grant | None = None
    granted_to: Peer | None = None
    after: After = None
    done: "Future[int]" = field(default_factory=Future)


@dataclass(slots=True)
class Counts:
    """What went over a lane since it was made."""

    num_pages: int = 0
    num_bytes: int = 0
    connects: int = 0
    failures: int = 0
    path: str = ""


class Lane(Closing):
    """The connection to one peer: made anew when the peer was, and never shared between threads.

    Attributes:
        counts: what went over it.
    """

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        greet: Callable[[], Hello],
        *,
        tuning: Tuning,
        connect_timeout_s: float,
    ) -> None:
        """To the peer that ``greet`` presents, each time that it is called.

        Args:
            name: of the peer, for messages.
            endpoint: of this side.
            greet: asks the peer for its addresses; raises where it must not be written to.
            tuning: how copies run.
            connect_timeout_s: limit for mapping the peer's pool.
        """
        self._name, self._endpoint, self._greet = name, endpoint, greet
        self._tuning, self._connect_timeout_s = tuning, connect_timeout_s
        self._peer: Peer | None = None
        self._stale: Peer | None = None  # the next question is for another connection
        self._peer_lock = threading.Lock()
        self._is_closed = False
        self._closing = threading.Lock()  # nothing is submitted behind the end of the queue
        self._owed: list[str] = []  # grants whose abort was not answered
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.counts = Counts()
        self._thread = threading.Thread(
            target=self._run, name=f"kvxfer-lmcache-{name}", daemon=True
        )
        self._thread.start()

    def connect(self) -> Peer:
        """The peer, met anew where the one before has ended; from any thread.

        Raises:
            KvxferError: it cannot be met, and why.
        """
        with self._peer_lock:
            if self._is_closed:
                raise InvalidUsage(f"the channel to {self._name} is closed")
            if self._peer is not None and (self._peer is self._stale or not _is_open(self._peer)):
                self._peer.close()
                self._peer = self._stale = None
            if self._peer is None:
                hello = self._greet()
                self._peer = self._endpoint.connect(
                    hello.addresses, deadline_s=self._connect_timeout_s
                )
                self.counts.connects += 1
            return self._peer

    def distrust(self, peer: Peer) -> None:
        """Meet the peer anew next time: with ``peer`` all ends that it holds over there."""
        # Not every link sees by itself that its peer was started anew.
        self._stale = peer

    def holds(self, peer: Peer) -> bool:
        """Whether ``peer`` is the connection still: what follows it may have its name."""
        return peer is self._peer and peer is not self._stale

    @property
    def is_open(self) -> bool:
        """Whether the peer that was met last is there, as far as is known here."""
        peer = self._peer
        return peer is not None and _is_open(peer)

    @property
    def has_lost(self) -> bool:
        """Whether a peer was met and has ended; not where it is being met."""
        peer = self._peer
        return peer is not None and not _is_open(peer)

    def submit(self, job: Job) -> None:
        """Start a batch behind those that were submitted before.

        Raises:
            InvalidUsage: the lane is closed.
        """
        with self._closing:
            if self._is_closed:
                raise InvalidUsage(f"the channel to {self._name} is closed")
            self._jobs.put(job)

    def retire(self) -> None:
        """Refuse what has not begun; the lane's thread unmaps once the rest has ended."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)

    @property
    def is_over(self) -> bool:
        """Whether nothing is moved or mapped any more, nor will be."""
        return self._is_closed and not self._thread.is_alive() and self._peer is None

    def close(self) -> None:
        """:meth:`retire`, and wait until nothing is mapped; may be called more than once."""
        self.retire()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _log.error(
                "pages to %s are still moved after %s s; their memory must stay",
                self._name,
                _JOIN_S,
            )
            return
        self._unmap()

    def _unmap(self) -> None:
        with self._peer_lock:  # who is meeting the peer meanwhile still stores it
            if self._peer is None:
                return
            try:
                self._peer.close()
                self._peer = None
            except TransferTimeout as error:
                _log.error(
                    "the lane to %s is not closed; its memory must stay: %s", self._name, error
                )

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.done.set_running_or_notify_cancel():
                self._abort(self._peer, job, "cancelled before it began")
                continue
            try:
                job.done.set_result(self._move(job))
            except Exception as error:
                self.counts.failures += 1
                job.done.set_exception(error)
        self._unmap()

    def _move(self, job: Job) -> int:
        if self._is_closed:
            raise InvalidUsage(f"the channel to {self._name} was closed")
        peer = self.connect()
        try:
            self._require_grantor(peer, job)
            self._take_back(peer)
            plan = job.plan(int(peer.view.addresses[0, 0]), peer.view.num_blocks)
            transfer = peer.link.post(plan, job.op, tuning=self._tuning, after=job.after)
            self._deliver(peer, job, transfer)
        except Exception as error:
            _await_end(peer)
            self._abort(peer, job, str(error))
            raise
        self.counts.num_pages += job.count
        self.counts.num_bytes += transfer.num_bytes
        self.counts.path = transfer.actual_path
        return job.count

    def _deliver(self, peer: Peer, job: Job, transfer: Transfer) -> None:
        """Commit while the bytes are on their way, since the receiver sees itself when they are
        there; returns once they are."""
        try:
            if job.grant is not None and job.grant.id:
                peer.commit(job.grant.id, transfer.sequence)
        finally:
            # Without a limit, which is its callers': only its end says that the pages are free.
            while not transfer.poll(_SLICE_S):
                pass

    def _take_back(self, peer: Peer) -> None:
        """Abort what was to be aborted before: of what was committed and did not arrive, the next
        transfer's number would say that it had.

        Raises:
            KvxferError: the peer does not answer; nothing may be written to it.
        """
        while self._owed:
            peer.abort(self._owed[0])
            del self._owed[0]

    def _require_grantor(self, peer: Peer, job: Job) -> None:
        granted_by = "" if job.grant is None else job.grant.incarnation
        if granted_by and granted_by != peer.incarnation:
            self.distrust(peer)
            raise PeerLost(
                f"{self._name} was started anew since it granted these pages; they are of "
                f"{granted_by}, it is now {peer.incarnation}: send the request again"
            )
        if job.granted_to is not None and job.granted_to is not peer:
            raise PeerLost(
                f"the connection to {self._name} over which it granted these pages has ended, and "
                "the pages with it: send the request again"
            )

    def _abort(self, peer: Peer | None, job: Job, reason: str) -> None:
        """Tell the peer that the pages of a grant will not come."""
        if peer is None or job.grant is None or not job.grant.id:
            return
        try:
            if _is_open(peer):  # else its grants have ended with the connection
                peer.abort(job.grant.id)
        except Exception as error:  # whatever it is, the lane's thread goes on
            self._owed.append(job.grant.id)
            _log.info("grant %s of %s is not aborted yet: %s", job.grant.id, self._name, error)
            _log.debug("it was given up because %s", reason)


def hold_until_over(done: "Future[int]", let_go: Callable[[], object]) -> None:
    """Call ``let_go`` once nobody moves the pages of a job that nobody waits for any more."""
    done.cancel()  # what has not begun
    done.add_done_callback(lambda _: let_go())


def _await_end(peer: Peer) -> None:
    """Wait for what its link has given up and cannot end: till then pages of either side move."""
    while (moving := peer.link.given_up) is not None:
        with suppress(KvxferError):
            moving.poll(_SLICE_S)


def _is_open(peer: Peer) -> bool:
    try:
        peer.link.require_open()
    except PeerLost:
        return False
    return True
