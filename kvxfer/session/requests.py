"""What answers an endpoint's alloc channel, and the simplest of them: a pool of blocks."""

import time
from typing import Protocol

from kvxfer.control import (
    AbortRequest,
    CommitRequest,
    DeferredReply,
    ReserveReply,
    ReserveRequest,
    TableSpec,
    WatchReply,
)
from kvxfer.control.messages import MAX_ERROR_CHARS
from kvxfer.errors import InvalidUsage
from kvxfer.layout import Share
from kvxfer.session.block_pool import BlockPool
from kvxfer.session.news import News

_RETRY_AFTER_S = 0.01


class Writers(Protocol):
    """The endpoint that requests are written to: what can be asked about a connection.

    Attributes:
        incarnation: the endpoint's own name.
    """

    incarnation: str

    def shares_of(self, connection: str) -> tuple[Share, ...]:
        """The layers and heads that its rank sends to this one; raises PeerLost if unknown."""

    def has_ended(self, connection: str) -> bool:
        """Whether no store of it can come any more: it, its process or its way here has ended."""

    def has_completed(self, connection: str, sequence: int) -> bool:
        """Whether the bytes of its transfer ``sequence`` are visible here."""


class Requests(Protocol):
    """The requests of an endpoint; all methods are called by its control thread."""

    def reserve(self, request: ReserveRequest) -> ReserveReply:
        """Blocks for a request of the current epoch."""

    def commit(self, request: CommitRequest) -> None:
        """A connection has written its share of a request."""

    def abort(self, request: AbortRequest) -> None:
        """A connection gives a request up, and writes to it no more."""

    def watch(self, connection: str) -> WatchReply | DeferredReply:
        """What became of a connection's requests, once there is something to tell."""

    def left(self, connection: str) -> None:
        """A connection has unmapped the cache."""

    def gone(self, connection: str) -> None:
        """The control connection has ended; whoever had it may write on."""

    def tick(self, now_s: float) -> float:
        """Do what is due at ``now_s`` (time.monotonic()); returns when to be called again."""


def not_visible_text(request: CommitRequest) -> str:
    """Why a commit is refused whose transfer is under way."""
    return (
        f"transfer {request.sequence} of request {request.request_id!r} is not visible yet; commit "
        "once it is"
    )


def waiting(request_id: str, retry_after_s: float) -> ReserveReply:
    """A reservation that is to be made again."""
    return ReserveReply(request_id=request_id, state="wait", retry_after_s=retry_after_s)


def refused(request_id: str, reason: str) -> ReserveReply:
    """A reservation that is turned away."""
    return ReserveReply(request_id=request_id, state="refused", reason=reason[:MAX_ERROR_CHARS])


class GivesUpNothing:
    """Of `Requests` none of which this side gives up by itself: who watches hears that it lives."""

    def __init__(self) -> None:
        """Nobody watches."""
        self._news = News()

    def watch(self, connection: str) -> WatchReply | DeferredReply:
        """Never a failure: signs of life."""
        return self._news.watch(connection, time.monotonic())

    def left(self, connection: str) -> None:
        """It watches no more."""
        self._news.forget(connection)

    def tick(self, now_s: float) -> float:
        """Tell who watches that this side lives."""
        self._news.tell(now_s)
        return self._news.next_s


class PoolRequests(GivesUpNothing):
    """Requests that a pool serves, each of one connection."""

    def __init__(self, writers: Writers, blocks: BlockPool) -> None:
        """Of the endpoint that ``writers`` is."""
        super().__init__()
        self._of = writers
        self._blocks = blocks

    def reserve(self, request: ReserveRequest) -> ReserveReply:
        """Blocks, or ``wait``."""
        name = request.request_id
        block_ids = self._blocks.reserve(request.incarnation, name, request.num_blocks)
        if block_ids is None:
            return waiting(name, _RETRY_AFTER_S)
        return ReserveReply(request_id=name, state="granted", tables=[TableSpec(block_ids)])

    def commit(self, request: CommitRequest) -> None:
        """The blocks are the engine's from now on.

        Raises:
            InvalidUsage: they are not reserved, or not filled.
        """
        if not self._of.has_completed(request.incarnation, request.sequence):
            raise InvalidUsage(not_visible_text(request))
        self._blocks.commit(request.incarnation, request.request_id)

    def abort(self, request: AbortRequest) -> None:
        """The blocks are free, unless they are committed."""
        self._blocks.abort(request.incarnation, request.request_id)

    def left(self, connection: str) -> None:
        """What it had reserved and not committed is free."""
        super().left(connection)
        self._blocks.abandon(connection)

    def gone(self, connection: str) -> None:
        """The same, once its process has ended."""
        if self._of.has_ended(connection):
            self._blocks.abandon(connection)
