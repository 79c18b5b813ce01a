"""Tells senders what became of their requests at a receiver: given up, or decided after a wait."""

import math

from kvxfer.control import DeferredReply, WatchReply
from kvxfer.control.messages import MAX_ERROR_CHARS, MAX_NEWS

_HOLD_S = 1.0  # an answer without news says that this side lives


class News:
    """What each connection has yet to hear, and the call by which it waits for that."""

    def __init__(self) -> None:
        """Nobody waits."""
        # By connection and request: why it has failed, or None where it need not wait any more.
        self._news: dict[str, dict[str, str | None]] = {}
        # By connection: its call, and when to answer that at the latest.
        self._waiting: dict[str, tuple[DeferredReply, float]] = {}

    @property
    def next_s(self) -> float:
        """When :meth:`tell` is due; infinity for never."""
        return min((end_s for _, end_s in self._waiting.values()), default=math.inf)

    def watch(self, connection: str, now_s: float) -> WatchReply | DeferredReply:
        """What a connection has not heard yet, or later what comes next."""
        if connection in self._news:
            return self._take(connection)
        # A call before it was given up by its caller, which asks again.
        answer = DeferredReply()
        self._waiting[connection] = (answer, now_s + _HOLD_S)
        return answer

    def add_failure(self, connection: str, request_id: str, reason: str) -> None:
        """A request of a connection has failed."""
        self._news.setdefault(connection, {})[request_id] = reason[:MAX_ERROR_CHARS]

    def add_decision(self, connection: str, request_id: str) -> None:
        """A reservation of a connection, which was to wait, would be answered now."""
        self._news.setdefault(connection, {}).setdefault(request_id, None)

    def is_heard_by(self, connection: str) -> bool:
        """Whether it waits for its news in a call."""
        return connection in self._waiting and self._waiting[connection][0].is_open

    def forget(self, connection: str) -> None:
        """A connection has ended."""
        self._news.pop(connection, None)
        self._waiting.pop(connection, None)

    def tell(self, now_s: float) -> None:
        """Answer who has something to hear, or has waited long enough to hear that all is well."""
        for connection, (answer, end_s) in list(self._waiting.items()):
            if connection not in self._news and now_s < end_s:
                continue
            del self._waiting[connection]
            # An answer that nobody takes any more would lose the news.
            if answer.is_open:
                answer.complete(self._take(connection))

    def _take(self, connection: str) -> WatchReply:
        news = self._news.pop(connection, {})
        told = {name: news.pop(name) for name in list(news)[:MAX_NEWS]}
        if news:
            self._news[connection] = news
        return WatchReply(
            failures=[(name, reason) for name, reason in told.items() if reason is not None],
            decided=[name for name, reason in told.items() if reason is None],
        )
