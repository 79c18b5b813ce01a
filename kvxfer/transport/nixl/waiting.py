"""How threads of this transport wait: for messages, and between two looks."""

import os
import time
from collections import deque

from kvxfer.transport.nixl.wire import Message

_MAX_MAIL = 4096
_SPIN_S = 200e-6


class Mailbox:
    """What one reader of an agent has been sent."""

    def __init__(self) -> None:
        self._mail: deque[tuple[str, Message]] = deque(maxlen=_MAX_MAIL)

    def put(self, sender: str, message: Message) -> None:
        """Add a message; the oldest goes where nobody reads."""
        self._mail.append((sender, message))

    def take(self) -> tuple[str, Message] | None:
        """The oldest message; None for none."""
        try:
            return self._mail.popleft()
        except IndexError:
            return None


class Pause:
    """Waits between two looks, longer the longer nothing has happened."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._since = time.perf_counter()

    def reset(self) -> None:
        """Something has happened."""
        self._since = time.perf_counter()

    def wait(self, longest_s: float | None = None) -> None:
        """Give the CPU away, for a while where it has been quiet."""
        quiet_s = time.perf_counter() - self._since
        if quiet_s < _SPIN_S:
            os.sched_yield()
        else:
            time.sleep(min(quiet_s / 8, longest_s or self._longest_s))
