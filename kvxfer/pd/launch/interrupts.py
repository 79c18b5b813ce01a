"""Ctrl-C and SIGTERM for who starts and ends programs: raised once, never amid a start or an end.

Python raises KeyboardInterrupt between any two instructions: after ``subprocess.Popen`` took its
lock, which nobody gives back then, or before a program that was just started is known to anyone.
So signals only count here; they become that exception outside of such places, and one time.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM)


class _Signals:
    """What came while handlers are ours."""

    def __init__(self, again: Callable[[], None]) -> None:
        self._again = again
        self._num_came = 0
        self._is_raised = False
        self.num_holds = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        self._num_came += 1
        if self._num_came > 1:
            self._again()
        self.raise_once()

    def raise_once(self) -> None:
        """Raise what came, unless it is held or was raised before."""
        if self._num_came and not self.num_holds and not self._is_raised:
            self._is_raised = True
            raise KeyboardInterrupt


_ours: _Signals | None = None


@contextmanager
def raised_once(again: Callable[[], None]) -> Iterator[None]:
    """The first signal raises KeyboardInterrupt in the block, so that an end that it began is not
    interrupted; each later one calls ``again``.

    Inside another such block, and in other threads than the main one, which signals do not reach,
    this changes nothing.
    """
    global _ours
    if _ours is not None or not _is_main_thread():
        yield
        return
    signals = _Signals(again)
    before = {}
    try:
        signals.num_holds += 1
        _ours = signals
        for number in _NUMBERS:
            before[number] = signal.signal(number, signals.handle)
        signals.num_holds -= 1
        signals.raise_once()
        yield
    finally:
        signals.num_holds += 1
        for number, handler in before.items():
            signal.signal(number, handler)
        _ours = None


@contextmanager
def held(again: Callable[[], None]) -> Iterator[None]:
    """A signal that comes in the block is raised after it; the second one calls ``again``."""
    with raised_once(again):
        signals = _ours
        if signals is None or not _is_main_thread():
            yield
            return
        signals.num_holds += 1
        try:
            yield
        finally:
            signals.num_holds -= 1
        signals.raise_once()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
