"""A request on its way: what its caller hands over, and what became of it at every rank."""

import logging
import threading
from collections.abc import Callable, Collection

from kvxfer.errors import InvalidUsage, KvxferError
from kvxfer.layout import Blocks
from kvxfer.session.parts import Part, Parts
from kvxfer.transport import StreamMark, Tuning

_log = logging.getLogger(__name__)


class Shipment:
    """What a `SendHandle` and the deliveries of its request share. Thread-safe.

    Attributes:
        request_id: which request.
        tokens: which of its tokens are sent.
        tuning: how to copy.
    """

    def __init__(
        self,
        request_id: str,
        parts: Parts,
        *,
        num_ranks: int,
        tuning: Tuning | None,
        tell: Callable[[], None],
    ) -> None:
        """To ``num_ranks`` ranks, by a sender, which ``tell`` wakes."""
        self.request_id = request_id
        self.tokens = parts.tokens
        self.tuning = tuning
        self._tell = tell
        self._parts = parts
        self._finished = False
        self._given_up = ""
        self._num_left = num_ranks
        self._num_bytes = 0
        self._paths: set[str] = set()
        self._errors: list[KvxferError] = []
        self._changed = threading.Condition()
        self._on_end: list[Callable[[], object]] = []

    # For the caller.

    def push(
        self,
        blocks: Blocks,
        tokens: range | None,
        layers: Collection[int] | None,
        after: StreamMark | None,
    ) -> None:
        """A part is ready; once the request has ended, this changes nothing.

        Raises:
            InvalidUsage: see `Parts.add`, or no more parts were to come.
        """
        with self._changed:
            if self.done:
                return
            if self._finished:
                raise InvalidUsage(f"request {self.request_id!r} is finished; push before that")
            self._parts.add(blocks, tokens, layers, after)
        self._tell()

    def finish(self) -> None:
        """No more parts come.

        Raises:
            InvalidUsage: they have not all that is to be sent; the request is given up.
        """
        with self._changed:
            gap = "" if self.done else self._parts.gap()
            self._finished = not gap
        if not gap:
            self._tell()
            return
        text = f"request {self.request_id!r} was finished without {gap}"
        self.give_up(text)
        raise InvalidUsage(f"{text}; push every token of every layer")

    def give_up(self, reason: str) -> None:
        """Have every rank end the request."""
        self._given_up = self._given_up or reason
        self._tell()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._num_left == 0

    @property
    def num_bytes(self) -> int:
        """Bytes that were written; complete once it is done."""
        return self._num_bytes

    @property
    def paths(self) -> frozenset[str]:
        """What carried them."""
        return frozenset(self._paths)

    def poll(self, timeout_s: float) -> bool:
        """Wait for the end; raises what went wrong first."""
        with self._changed:
            ended = self._changed.wait_for(lambda: self.done, timeout_s)
        if ended and self._errors:
            raise self._errors[0]
        return ended

    def on_end(self, call: Callable[[], object]) -> None:
        """Have ``call`` run once it is done; at once where it is."""
        with self._changed:
            if not self.done:
                self._on_end.append(call)
                return
        call()

    # For the deliveries.

    @property
    def given_up(self) -> str:
        """Why the caller, or another rank, gives the request up; empty where nobody does."""
        return self._given_up or (str(self._errors[0]) if self._errors else "")

    def ready(self, first: int) -> tuple[list[Part], bool]:
        """The parts from number ``first`` on, and whether no more will come."""
        with self._changed:
            return self._parts.parts[first:], self._finished

    def end_all(self, error: KvxferError) -> None:
        """No rank that has not ended can end any more, because nobody works on them."""
        if not self.done:
            self.end_rank(0, error, num_ranks=self._num_left)

    def end_rank(
        self, num_bytes: int, error: KvxferError | None, *, num_ranks: int = 1, path: str = ""
    ) -> None:
        """A rank has ended, or several have."""
        with self._changed:
            self._paths |= {path} if path else set()
            self._num_bytes += num_bytes
            self._num_left -= num_ranks
            if error is not None:
                self._errors.append(error)
            calls = []
            if self.done:
                calls, self._on_end = self._on_end, []
                self._parts.parts.clear()  # and with them the marks and tables
            self._changed.notify_all()
        for call in calls:
            try:
                call()
            except Exception:
                # The caller's own fault, on the thread that serves every request.
                _log.exception("a callback at the end of request %r failed", self.request_id)
