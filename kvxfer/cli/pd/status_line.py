"""One line on standard error that says what runs, or a line a change where that is no terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.status import Status

from kvxfer.closing import Closing
from kvxfer.pd.launch.stack import ProgramState

_MARKS = {"waiting": "…", "starting": "starting", "up": "up", "ended": "ENDED"}


class StatusLine(Closing):
    """The line. A context manager; nothing of it stays on a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status: Status | None = None
        self._last = ""
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()

    def show(self, text: str, *, key: str | None = None) -> None:
        """Show ``text``; without a terminal only where ``key``, or the text, is another."""
        if self._status is not None:
            self._status.update(text)
        elif (key or text) != self._last:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._last = key or text

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show_states(self, title: str, states: Sequence[ProgramState]) -> None:
        """What every program does, and since when."""
        known = ", ".join(f"{one.name} {_MARKS[one.state]}" for one in states)
        age_s = max((one.age_s for one in states), default=0.0)
        self.show(f"{title}: {known} ({age_s:.0f} s)", key=f"{title}{known}")

    def close(self) -> None:
        """Take the line away."""
        if self._status is not None:
            self._status.stop()
