"""What a caller holds of a request that is being sent."""

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from kvxfer.errors import InvalidUsage, KvxferError, TransferTimeout


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers that are ready to be sent; None = all."""

    layers: frozenset[int] | None
    after_stream: int | None = None


class SendHandle:
    """A request on its way to every rank of a receiver. Thread-safe, and may be awaited.

    The source blocks must stay as they are until it has ended.

    Attributes:
        request_id: which request.
    """

    def __init__(
        self, request_id: str, layers: range, num_ranks: int, tell: Callable[[], None]
    ) -> None:
        """Of a sender, which ``tell`` wakes."""
        self.request_id = request_id
        self._layers = layers
        self._tell = tell
        self._num_left = num_ranks
        self._num_bytes = 0
        self._paths: set[str] = set()
        self._pieces: list[Piece] = []
        self._complete = False
        self._given_up = False
        self._errors: list[KvxferError] = []
        self._changed = threading.Condition()
        self._on_end: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._num_left == 0

    @property
    def num_bytes(self) -> int:
        """Bytes that were written; complete once it is done."""
        return self._num_bytes

    @property
    def actual_path(self) -> str:
        """What carried the bytes, read back; of ranks that differ all of them; complete at the end.

        Empty where nothing was to be moved.
        """
        return "; ".join(sorted(self._paths))

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait up to ``timeout_s``; True once every rank has all bytes and was told.

        Raises:
            KvxferError: what went wrong first, once no rank is written to any more.
        """
        with self._changed:
            ended = self._changed.wait_for(lambda: self.done, timeout_s)
        if ended and self._errors:
            raise self._errors[0]
        return ended

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once every rank has all bytes and was told.

        Args:
            timeout_s: how long to wait; None = until it ends, which the limits of the sender bound.

        Raises:
            TransferTimeout: it has not ended within ``timeout_s``; the source may still be read.
            KvxferError: what went wrong first, once no rank is written to any more.
        """
        end_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        # In slices, because Python delivers signals (Ctrl-C) only between waits.
        while not self.poll(min(0.2, max(end_s - time.monotonic(), 0.0))):
            if time.monotonic() >= end_s:
                raise TransferTimeout(
                    f"request {self.request_id!r} was not sent within {timeout_s} s; keep its "
                    "blocks until it has ended, or cancel it and wait"
                )

    def __await__(self) -> Generator[object, None, None]:
        """Wait without blocking the event loop; for what it raises see :meth:`wait`."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

        with self._changed:
            if not self.done:
                self._on_end.append(wake)
        if not self.done:
            yield from event.wait().__await__()
        self.poll()

    def cancel(self) -> None:
        """Give the request up: its receiver is told once nothing is written any more.

        Wait for the end before the source blocks are used again. A request that is committed
        everywhere stays so.
        """
        self._given_up = True
        self._tell()

    def layer(self, layer: int, *, after_stream: int | None = None) -> None:
        """Send a layer, of a request that :meth:`Sender.send_layers` began.

        After the last layer of this rank the request is committed.

        Args:
            layer: its number in the whole model; each once.
            after_stream: see :meth:`Link.post`; the stream must last until the request has ended.

        Raises:
            InvalidUsage: a layer that this rank does not hold, or one that was sent before.
        """
        with self._changed:
            sent = {one for piece in self._pieces for one in piece.layers or ()}
            if self._complete or layer not in self._layers or layer in sent:
                raise InvalidUsage(
                    f"layer {layer} of request {self.request_id!r} was sent before, or is not one "
                    f"of {self._layers.start} to {self._layers.stop - 1}; send each of them once"
                )
            self._pieces.append(Piece(frozenset([layer]), after_stream))
            self._complete = len(sent) + 1 == len(self._layers)
        self._tell()

    # For the sender.

    def push_all(self, layers: frozenset[int] | None, after_stream: int | None) -> None:
        """All that is to be sent is ready."""
        self._pieces.append(Piece(layers, after_stream))
        self._complete = True

    @property
    def is_given_up(self) -> bool:
        """Whether the caller, or another rank, gives the request up."""
        return self._given_up or bool(self._errors)

    def ready(self, first: int) -> tuple[list[Piece], bool]:
        """The pieces from number ``first`` on, and whether no more will come."""
        with self._changed:
            return self._pieces[first:], self._complete

    def end_all(self, error: KvxferError) -> None:
        """No rank can end any more, because nobody works on them."""
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
            calls = self._on_end if self.done else []
            self._changed.notify_all()
        for call in calls:
            call()
