"""What a PD sender knows of the batches that it has submitted."""

import threading
from typing import Any

from kvxfer.errors import InvalidUsage, TransferTimeout

_FAILED = "kvxfer_failed"


class Host(str):
    """A receiver's host, to which LMCache adds the number of a port to name the receiver.

    It does so without a separator, by which 127.0.0.1 with port 17300 and 127.0.0.11 with port 7300
    have one name, and the pages of the second go to the first.
    """

    __slots__ = ()

    def __add__(self, port: str) -> str:
        return f"{self}:{port}"


class Batch:
    """A request's ``DisaggSpec`` as it was when one batch of it was submitted.

    vLLM's adapter changes the spec from step to step, while LMCache reads it when the batch has
    been written: a batch that was not the last is then taken for it, and notified.
    """

    def __init__(self, spec: Any) -> None:
        self.request = spec
        self.receiver_host = Host(spec.receiver_host)
        self._is_last = bool(getattr(spec, "is_last_prefill", False))

    @property
    def is_last_prefill(self) -> bool:
        """Whether the request is over there once this batch is."""
        return self._is_last and not has_failed(self.request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)


def mark_failed(spec: Any) -> None:
    """Part of a request was lost: nobody may be told that it is there."""
    # On the request itself, because its id may be used again for another.
    setattr(spec, _FAILED, True)


def has_failed(spec: Any) -> bool:
    """Whether part of a request was lost."""
    return bool(getattr(spec, _FAILED, False))


class InFlight:
    """How many batches are on their way. Thread-safe."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def begin(self) -> None:
        """One more."""
        with self._changed:
            self._count += 1

    def end(self, *_: object) -> None:
        """One less; its pages are free."""
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def await_room(self, shelf: Any, timeout_s: float) -> None:
        """Wait until the sender's pool has a free page.

        Raises:
            InvalidUsage: none is on its way out, so none will come.
            TransferTimeout: none came in time.
        """
        if shelf.num_free():
            return
        with self._changed:
            in_time = self._changed.wait_for(lambda: shelf.num_free() or not self._count, timeout_s)
        if not in_time:
            raise TransferTimeout(
                f"no page of this sender's pool of {shelf.num_pages} became free within "
                f"{timeout_s} s; the receivers take none"
            )
        if not shelf.num_free():
            raise InvalidUsage(
                f"one store needs more than the {shelf.num_pages} pages of {shelf.page_bytes} "
                "bytes of this sender's pool; raise pd_buffer_size, or let the engine prefill "
                "fewer tokens at a time"
            )
