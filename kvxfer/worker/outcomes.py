"""How requests ended, for those who ask, before or after."""

import threading

from kvxfer.control import DeferredReply
from kvxfer.worker.messages import AskOutcome, Outcome

_NUM_KEPT = 65536


class Outcomes:
    """Ends of requests. Thread-safe; the oldest is forgotten first."""

    def __init__(self) -> None:
        """None has ended yet."""
        self._ended: dict[str, Outcome] = {}
        self._asked: dict[str, list[DeferredReply]] = {}
        self._untold: set[str] = set()
        self._lock = threading.Condition()

    def ask(self, request: AskOutcome) -> Outcome | DeferredReply:
        """The outcome, or a promise of it."""
        name = request.request_id
        with self._lock:
            if name in self._ended:
                self._tell(name)
                return self._ended[name]
            owed = DeferredReply(on_abandoned=lambda: self._forget(name, owed))
            self._asked.setdefault(name, []).append(owed)
            return owed

    def add(self, outcome: Outcome) -> None:
        """A request has ended."""
        with self._lock:
            self._ended[outcome.request_id] = outcome
            if len(self._ended) > _NUM_KEPT:
                oldest = next(iter(self._ended))
                del self._ended[oldest]
                self._untold.discard(oldest)
            self._untold.add(outcome.request_id)
            asked = self._asked.pop(outcome.request_id, [])
        for owed in asked:
            if owed.complete(outcome):
                self._tell(outcome.request_id)

    def wait_told(self, timeout_s: float) -> bool:
        """Wait until somebody has asked for every outcome; False where nobody did in time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._untold, timeout_s)

    def _tell(self, name: str) -> None:
        with self._lock:
            self._untold.discard(name)
            self._lock.notify_all()

    def _forget(self, name: str, owed: DeferredReply) -> None:
        with self._lock:
            left = [one for one in self._asked.pop(name, []) if one is not owed]
            if left:
                self._asked[name] = left
