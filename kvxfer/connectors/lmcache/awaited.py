"""Requests that wait in a decode engine's scheduler until their KV is in the engine's buffer.

Where both legs of a request are sent at once, the decode leg names the transfer (`ReceiveParams`),
which is the prefill leg's ``req_id``. Each rank tells the scheduler with the output of a step which
transfers have ended there, and only then is the request looked up: a lookup costs milliseconds and
pins what it finds.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

_MAX_TRANSFERS: Final = 4096  # of which ranks have told; most are never asked for
_log = logging.getLogger(__name__)


class Ended(NamedTuple):
    """Transfers that are over at a rank.

    Attributes:
        arrived: of these it has all KV.
        lost: of these it will never have all.
    """

    arrived: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class Awaited:
    """The scheduler's side. Not thread-safe, as the scheduler is not."""

    def __init__(
        self, num_ranks: int, timeout_s: float, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Of an engine with ``num_ranks`` receivers; nobody waits longer than ``timeout_s``."""
        self._num_ranks, self._timeout_s, self._now_s = num_ranks, timeout_s, now_s
        self._missing: dict[str, int] = {}  # ranks that have not told, by transfer
        self._lost: set[str] = set()
        self._deadlines_s: dict[str, float] = {}  # by request

    def note(self, arrived: Iterable[str], lost: Iterable[str]) -> None:
        """What ranks have told; a transfer that several have is named several times."""
        for transfer in arrived:
            self._missing[transfer] = self._missing.get(transfer, self._num_ranks) - 1
        for transfer in lost:
            self._missing[transfer] = 0
            self._lost.add(transfer)
        while len(self._missing) > _MAX_TRANSFERS:
            oldest = next(iter(self._missing))
            del self._missing[oldest]
            self._lost.discard(oldest)

    def is_over(self, request_id: str, transfer_id: str) -> bool:
        """Whether waiting is over: all of the KV is there, or no more will come in time.

        It may be asked any number of times, until :meth:`forget`.
        """
        now_s = self._now_s()
        deadline_s = self._deadlines_s.setdefault(request_id, now_s + self._timeout_s)
        if self._missing.get(transfer_id, self._num_ranks) <= 0:
            if transfer_id in self._lost:
                self._give_up(request_id, transfer_id, "was lost on its way")
            return True
        if now_s < deadline_s:
            return False
        self._give_up(request_id, transfer_id, f"has not arrived within {self._timeout_s:g} s")
        return True

    def forget(self, request_id: str) -> None:
        """The request has ended, or was aborted."""
        self._deadlines_s.pop(request_id, None)

    def _give_up(self, request_id: str, transfer_id: str, why: str) -> None:
        if self._deadlines_s[request_id] > float("-inf"):
            _log.warning(
                "request %s: its KV (transfer %r) %s; what is not there is computed here",
                request_id,
                transfer_id,
                why,
            )
        self._deadlines_s[request_id] = float("-inf")
