"""What a worker counts of its transfers, between two looks of the engine."""

import threading

# Of each interval at most so many durations are kept, so that a slow reader costs no memory.
_MAX_SAMPLES = 1024


class Counters:
    """Sums and samples. Thread-safe.

    Names that end in ``_s`` are lists of seconds, ``num_quarantined_blocks`` is how many there are
    now, and all else is a sum since the last :meth:`take`.
    """

    def __init__(self) -> None:
        """All zero."""
        self._lock = threading.Lock()
        self._sums: dict[str, int] = {}
        self._samples: dict[str, list[float]] = {}
        self._num_quarantined = 0
        self._told_quarantined = 0

    def add(self, **amounts: int) -> None:
        """Raise sums."""
        with self._lock:
            self._add(amounts)

    def add_sent(self, num_bytes: int, duration_s: float) -> None:
        """A request was sent, ``duration_s`` after its first chunk was scheduled."""
        with self._lock:
            self._add({"num_sends": 1, "sent_bytes": num_bytes})
            self._sample("send_s", duration_s)

    def add_received(self, num_bytes: int, duration_s: float) -> None:
        """A request was received, ``duration_s`` after it had blocks."""
        with self._lock:
            self._add({"num_receives": 1, "received_bytes": num_bytes})
            self._sample("receive_s", duration_s)

    def add_quarantined(self, num_blocks: int) -> None:
        """Blocks that a writer may still write to; negative once it cannot."""
        with self._lock:
            self._num_quarantined += num_blocks

    def take(self) -> dict[str, int | list[float]]:
        """All that was counted since the last call; empty where nothing has happened."""
        with self._lock:
            taken: dict[str, int | list[float]] = {**self._sums, **self._samples}
            self._sums, self._samples = {}, {}
            if taken or self._num_quarantined != self._told_quarantined:
                taken["num_quarantined_blocks"] = self._told_quarantined = self._num_quarantined
            return taken

    def _add(self, amounts: dict[str, int]) -> None:
        for name, amount in amounts.items():
            self._sums[name] = self._sums.get(name, 0) + amount

    def _sample(self, name: str, value: float) -> None:
        samples = self._samples.setdefault(name, [])
        if len(samples) < _MAX_SAMPLES:
            samples.append(value)
