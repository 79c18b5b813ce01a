"""When a request's KV was looked up, placed, loaded and used: a line of JSON each, in a file.

All times are seconds of the monotonic clock, which all processes of a host share. Lines of one
request come from the scheduler's process and from each worker's; a file is only ever appended to.
"""

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from kvxfer.errors import InvalidUsage
from kvxfer.whole_file import read_bounded

MAX_LINES: Final = 100_000
"""Of one process; what comes after is not written."""
MAX_FILE_BYTES: Final = 64 << 20
_MAX_REQUESTS: Final = 4096  # whose events are remembered
_log = logging.getLogger(__name__)

What: TypeAlias = Literal[
    "cache", "arrived", "asked", "answered", "placed", "begun", "loaded", "waited", "scheduled"
]
"""In the scheduler: ``arrived`` there, ``asked`` the connector for the first time, ``answered`` by
it, ``placed`` in blocks that KV is to be loaded into, ``scheduled`` for its first step. In a
worker: ``begun`` is the step that loads it, ``loaded`` when all of it is there, ``waited`` so
long in layers besides. ``cache`` is said once of an engine."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line.

    Args:
        what: happened.
        at_s: on the monotonic clock.
        request: vLLM's id of it.
        num_tokens: that the store was found to hold, beyond those in the engine's own cache.
        seconds: of ``waited``.
        token_bytes: of ``cache``: KV of one token in one rank.
    """

    what: What
    at_s: float
    request: str = ""
    num_tokens: int = 0
    seconds: float = 0.0
    token_bytes: int = 0


class Timings:
    """Appends events to a file, the first of a kind of each request; never fails its caller."""

    def __init__(self, path: Path | None) -> None:
        """To ``path``, which is made at the first event; None = to nowhere."""
        self._path = path
        self._descriptor = -1
        self._num_lines = 0
        self._seen: dict[str, set[str]] = {}

    def note(self, what: What, request: str = "", **more: float) -> None:
        """It happened now; only the first time is written. ``more``: fields of `Event`."""
        if self._path is None or what in self._seen.get(request, ()):
            return
        self._remember(request).add(what)
        event = Event(what=what, at_s=time.monotonic(), request=request, **more)  # type: ignore[arg-type]
        self._write(msgspec.json.encode(event) + b"\n")

    def forget(self, request: str) -> None:
        """It has ended; another of that id is written anew."""
        self._seen.pop(request, None)

    def close(self) -> None:
        """Write nothing more."""
        self._path = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _remember(self, request: str) -> set[str]:
        if request not in self._seen and len(self._seen) >= _MAX_REQUESTS:
            del self._seen[next(iter(self._seen))]
        return self._seen.setdefault(request, set())

    def _write(self, line: bytes) -> None:
        try:
            if self._descriptor < 0:
                assert self._path is not None
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o600)
            os.write(self._descriptor, line)  # at once, so that lines of processes do not mix
        except OSError as error:
            _log.warning("no more timings: %s: %s", self._path, error.strerror)
            self.close()
            return
        self._num_lines += 1
        if self._num_lines >= MAX_LINES:
            _log.warning("no more timings: %d lines are enough", MAX_LINES)
            self.close()


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, in its order; a last line that is not whole is left out.

    Raises:
        InvalidUsage: it cannot be read, is too large, or holds what is no event.
    """
    whole, _, _ = read_bounded(path, MAX_FILE_BYTES).rpartition(b"\n")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            yield msgspec.json.decode(line, type=Event)
        except msgspec.DecodeError as error:
            raise InvalidUsage(f"{path}, line {number}: {error}") from error
