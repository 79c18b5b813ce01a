"""Which connections that used to give signs of life have stopped."""

import time


class Silence:
    """When each connection was heard last."""

    def __init__(self, limit_s: float) -> None:
        """A connection is silent once it was not heard for ``limit_s``."""
        self._limit_s = limit_s
        self._heard_s: dict[str, float] = {}
        self._looked_s = time.monotonic()

    @property
    def is_watching(self) -> bool:
        """Whether :meth:`take_silent` has anybody to look at."""
        return bool(self._heard_s)

    def heard(self, connection: str) -> None:
        """A sign of life."""
        self._heard_s[connection] = time.monotonic()

    def forget(self, connection: str) -> None:
        """The connection has ended."""
        self._heard_s.pop(connection, None)

    def take_silent(self, now_s: float) -> list[str]:
        """Who has been silent for too long, and is forgotten now. To be called once a second."""
        # A side that slept itself must first read what has come meanwhile.
        if now_s - self._looked_s > self._limit_s / 2:
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        self._looked_s = now_s
        late_s = now_s - self._limit_s
        silent = [name for name, heard_s in self._heard_s.items() if heard_s < late_s]
        for name in silent:
            del self._heard_s[name]
        return silent
