"""Requests that wait in a decode engine's scheduler until their KV is in the engine's buffer.

Where both legs of a request are sent at once, the decode leg names the transfer (`ReceiveParams`),
which is the prefill leg's ``req_id``. Each rank tells the scheduler with the output of a step which
transfers have ended there, and only then is the request looked up: a lookup costs milliseconds and
pins what it finds.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

_OVER_S: Final = float("-inf")
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
        """Of an engine with ``num_ranks`` receivers; nobody waits longer than ``timeout_s``.

        Where there is none, nobody waits.
        """
        self._num_ranks, self._timeout_s, self._now_s = num_ranks, timeout_s, now_s
        self._missing: dict[str, int] = {}  # ranks that have not told, by transfer
        self._lost: set[str] = set()
        self._deadlines_s: dict[str, float] = {}  # by request; in the past once waiting is over

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

    def stop(self) -> None:
        """Nothing arrives at one of the ranks, so that waiting is in vain."""
        if self._num_ranks:
            _log.error("LMCache receives nothing at one rank: no request waits for its KV any more")
        self._num_ranks = 0

    def is_over(self, request_id: str, transfer_id: str) -> bool:
        """Whether waiting is over: all of the KV is there, or no more will come in time.

        It may be asked any number of times, until :meth:`forget`.
        """
        now_s = self._now_s()
        deadline_s = self._deadlines_s.setdefault(request_id, now_s + self._timeout_s)
        if deadline_s == _OVER_S:  # a request that was preempted waits no second time
            return True
        is_told = self._missing.get(transfer_id, self._num_ranks) <= 0
        if not is_told and now_s < deadline_s:
            return False
        self._deadlines_s[request_id] = _OVER_S
        if not is_told:
            self._warn(request_id, transfer_id, f"has not arrived within {self._timeout_s:g} s")
        elif transfer_id in self._lost:
            self._warn(request_id, transfer_id, "was lost on its way")
        return True

    def forget(self, request_id: str) -> None:
        """The request has ended, or was aborted."""
        self._deadlines_s.pop(request_id, None)

    def _warn(self, request_id: str, transfer_id: str, why: str) -> None:
        _log.warning(
            "request %s: its KV (transfer %r) %s; what is not there is computed here",
            request_id,
            transfer_id,
            why,
        )


def num_receivers(config: Any, *, world_size: int, is_mla: bool) -> int:
    """Ranks that receive, in an engine of LMCache's ``config``; 0 where none does."""
    if not config.enable_pd or config.pd_role != "receiver":
        return 0
    # All ranks have the same KV of MLA, so that LMCache keeps it at the first and broadcasts it.
    is_first_alone = is_mla and config.get_extra_config_value("save_only_first_rank", True)
    return 1 if is_first_alone else world_size
