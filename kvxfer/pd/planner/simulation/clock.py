"""Simulated time: calls at instants, those of one instant in the order they were made."""

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """A heap of calls to come; the same calls in the same order give the same run."""

    def __init__(self) -> None:
        """It is 0 s, and nothing is to come."""
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_made = 0

    @property
    def has_calls(self) -> bool:
        """Whether anything is to come."""
        return bool(self._calls)

    def at(self, when_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call ``call(*args)`` then, or now where that has passed."""
        self._num_made += 1
        heapq.heappush(self._calls, (max(when_s, self.now_s), self._num_made, call, args))

    def run(self) -> None:
        """Make all calls, those that calls add too."""
        calls = self._calls
        while calls:
            self.now_s, _, call, args = heapq.heappop(calls)
            call(*args)
