"""Waiting for what must come, in tests."""

import time
from collections.abc import Callable

GUARD_S = 60.0  # far longer than anything takes


def eventually(condition: Callable[[], bool], what: str, limit_s: float = GUARD_S) -> None:
    """Return when ``condition`` holds; fail with ``what`` where it does not within ``limit_s``."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.01)
