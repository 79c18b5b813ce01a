"""The book of a receiver's requests, with writers that only say what they would do."""

import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvxfer.control import (
    AbortRequest,
    CommitRequest,
    DeferredReply,
    ReserveReply,
    ReserveRequest,
    WatchReply,
)
from kvxfer.errors import PeerLost
from kvxfer.layout import KVLayout, Share
from kvxfer.session.block_pool import BlockPool
from kvxfer.session.offers import Notice
from kvxfer.session.placement import PoolPlacement
from kvxfer.session.request_book import RequestBook
from kvxfer.session.states import ReceiveLimits

NUM_BLOCKS = 8
LAYOUT = KVLayout(2, 2, head_dim=8, block_size=4)
HALVES = {
    "one": (Share(range(2), range(1)),),
    "two": (Share(range(2), range(1, 2)),),
    "all": (Share(range(2), range(2)),),
    "none": (),
}


@dataclass
class Writers:
    """What the book asks about connections."""

    ended: set[str] = field(default_factory=set)
    invisible: set[str] = field(default_factory=set)

    def shares_of(self, connection: str) -> tuple[Share, ...]:
        if connection.partition("-")[0] not in HALVES:
            raise PeerLost(f"connection {connection!r} is not known")
        return HALVES[connection.partition("-")[0]]

    def has_ended(self, connection: str) -> bool:
        return connection in self.ended

    def has_completed(self, connection: str, sequence: int) -> bool:
        return connection not in self.invisible


class Book:
    """A book of a pool, and all that it says."""

    def __init__(self, **limits: Any) -> None:
        self.writers = Writers()
        self.pool = BlockPool(NUM_BLOCKS)
        self.notices: list[Notice] = []
        self.freed: list[tuple[str, tuple[int, ...]]] = []
        self.book = RequestBook(
            self.writers,
            PoolPlacement(self.pool, NUM_BLOCKS, LAYOUT),
            num_pairs=4,
            limits=ReceiveLimits(**limits),
            on_notice=self.notices.append,
            on_free=lambda request_id, block_ids: self.freed.append((request_id, block_ids)),
            num_unread=lambda: 0,
        )

    def reserve(self, who: str, name: str = "r", num_blocks: int = 2, **args: Any) -> Any:
        request = ReserveRequest(
            request_id=name, num_blocks=num_blocks, epoch=1, incarnation=who, **args
        )
        return self.book.reserve(request)

    def granted(self, who: str, name: str = "r", num_blocks: int = 2) -> list[int]:
        reply = self.reserve(who, name, num_blocks)
        assert isinstance(reply, ReserveReply)
        assert reply.state == "granted", reply
        return reply.block_ids

    def refused(self, who: str, name: str = "r", **args: Any) -> str:
        reply = self.reserve(who, name, **args)
        assert isinstance(reply, ReserveReply)
        assert reply.state == "refused", reply
        return reply.reason

    def waits(self, who: str, name: str, num_blocks: int) -> float:
        """When to ask again, in seconds, for who would hear before."""
        watch = self.book.watch(who)
        assert isinstance(watch, DeferredReply)
        reply = self.reserve(who, name, num_blocks)
        watch.abandon()
        assert reply.state == "wait", reply
        retry_after_s: float = reply.retry_after_s
        return retry_after_s

    def news(self, who: str) -> WatchReply | None:
        """What ``who`` has yet to hear; None for nothing."""
        news = self.book.watch(who)
        if isinstance(news, DeferredReply):
            news.abandon()
            return None
        return news

    def decided(self, who: str) -> list[str]:
        """Which requests of ``who`` need not wait any more."""
        news = self.news(who)
        return [] if news is None else news.decided

    def commit(self, who: str, name: str = "r") -> None:
        self.book.commit(CommitRequest(name, who, sequence=1))

    def abort(self, who: str, name: str = "r") -> None:
        self.book.abort(AbortRequest(name, who, reason="it thought better of it"))

    def tick(self, later_s: float = 0.0) -> None:
        self.book.tick(time.monotonic() + later_s)

    def only_notice(self) -> Notice:
        assert len(self.notices) == 1, self.notices
        return self.notices[0]


@pytest.fixture
def book() -> Book:
    return Book()
