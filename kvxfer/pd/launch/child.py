"""One process of a set-up: its guard, its log, its end."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kvxfer.closing import Closing
from kvxfer.pd.launch import guard, interrupts

_GUARD: Final = "kvxfer.pd.launch.guard"
_END_S: Final = guard.LONGEST_S + 2.0
_KILLED_S: Final = 2.0  # a guard, which holds nothing
_LOOK_S: Final = 0.02
_TAIL_BYTES = 64 << 10


class Child(Closing):
    """A running program with all that it starts. A context manager."""

    def __init__(
        self, name: str, words: Sequence[str], *, environment: Mapping[str, str], folder: Path
    ) -> None:
        """Start it.

        Args:
            name: for people, and of its log.
            words: the program and its arguments.
            environment: all of its variables.
            folder: where it stands and where ``NAME.log`` is written; an empty one, so that Python
                finds no packages there.
        """
        self.name = name
        self.words = tuple(words)
        self.log = folder / f"{name}.log"
        self._status: int | None = None
        with interrupts.held(_hasten_all), self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _GUARD, *words],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends it
            )
            _open.append(self)

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        if self._status is None:
            # Popen.poll takes a lock, which an interrupt between two instructions leaves taken.
            look = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if found := os.waitid(os.P_PID, self._process.pid, look):
                is_exit = found.si_code == os.CLD_EXITED
                self._status = found.si_status if is_exit else -found.si_status
        return self._status

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, once it has ended; None after ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while (status := self.poll()) is None and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        return status

    def tail(self, num_lines: int) -> list[str]:
        """The last lines of its log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-num_lines:]

    def close(self) -> None:
        """End it and everything that it started; as :func:`close_all`."""
        close_all([self])

    def _tell(self, word: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # the guard has ended; it is closed
            self._process.stdin.write(word)

    def _finish(self, deadline_s: float) -> None:
        """Wait for its end, and give up what is held of it."""
        if self.wait(max(0.0, deadline_s - time.monotonic())) is None:
            self._process.kill()  # a guard that hangs; the program follows it
            self.wait(_KILLED_S)
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._status is not None:
            self._process.wait()  # it has ended, so this only takes its status from the kernel
        if self in _open:
            _open.remove(self)


_open: Final[list[Child]] = []  # those that were started and not ended, in this order


def close_all(children: Sequence[Child]) -> None:
    """End several at once, within a bounded time.

    A first Ctrl-C meanwhile is raised once they have ended; a second one kills them.
    """
    with interrupts.held(_hasten_all):
        for child in children:
            child._tell(guard.END)
        deadline_s = time.monotonic() + _END_S
        for child in children:
            child._finish(deadline_s)


@contextmanager
def all_ended() -> Iterator[None]:
    """A block that ends whatever was started in it, also where Ctrl-C or SIGTERM came at a moment
    when nobody else does. Those are raised as KeyboardInterrupt once; a second one kills."""
    with interrupts.raised_once(_hasten_all):
        try:
            yield
        finally:
            close_all(_open[::-1])


def _hasten_all() -> None:
    for child in _open:
        child._tell(guard.KILL)
