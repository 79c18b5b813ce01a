"""One process of a set-up: its guard, its log, its end."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvxfer.closing import Closing
from kvxfer.pd.launch import guard

_GUARD: Final = "kvxfer.pd.launch.guard"
_MARGIN_S = 2.0
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
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _GUARD, *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends it
            )

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, once it has ended; None after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def tail(self, num_lines: int) -> list[str]:
        """The last lines of its log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-num_lines:]

    def ask_to_end(self) -> None:
        """Begin its end, without waiting: several end at once."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        """End it and everything that it started."""
        self.ask_to_end()
        if self.wait(guard.END_S + guard.REST_S + guard.KILLED_S + _MARGIN_S) is None:
            self._process.kill()  # a guard that hangs; the program follows it
            self._process.wait()


def close_all(children: Sequence[Child]) -> None:
    """End several at once. Ctrl-C meanwhile is raised once they have ended, which is bounded."""
    interrupt: KeyboardInterrupt | None = None
    for child in children:
        child.ask_to_end()
    left = list(children)
    while left:
        try:
            left[0].close()
            del left[0]
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
