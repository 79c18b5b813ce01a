"""Runs the measuring process, and survives it."""

import logging
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvxfer.diagnose.figures import Figure, Figures
from kvxfer.diagnose.measure.events import (
    Begun,
    BusyPcie,
    Ended,
    Event,
    Measured,
    Skipped,
    Task,
    decode_event,
)
from kvxfer.env import child_environment
from kvxfer.errors import InvalidUsage

_PROGRAM = (sys.executable, "-m", "kvxfer.diagnose.measure.main")
_START_S = 20.0  # contexts on eight GPUs
_GRACE_S = 25.0  # the longest single copy, after the budget
_END_S = 5.0
_CHUNK_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class Collector:
    """Makes figures of events.

    Attributes:
        figures: so far.
        has_ended: whether the process said that it is done.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Tell ``tell`` what is measured."""
        self._tell = tell
        self.figures = Figures()
        self.has_ended = False
        self._open: Begun | None = None

    def take(self, event: Event) -> None:
        """One more event."""
        if isinstance(event, Begun):
            self._open = event
            self._tell(f"{event.kind} {event.src} -> {event.dst}")
        elif isinstance(event, Measured):
            self.figures.all.append(event.figure)
            self._open = None
        elif isinstance(event, BusyPcie):
            self.figures.busy_pcie[event.gpu] = event.link
        elif isinstance(event, Skipped):
            self.figures.skipped.setdefault(event.what, event.reason)
            self._open = None
        elif isinstance(event, Ended):
            self.has_ended = True

    def break_off(self, reason: str) -> None:
        """The process is gone; what it was measuring is what it died of."""
        if self.has_ended:
            return
        one = self._open or Begun("start", "all", "all")
        self.figures.all.append(Figure(kind=one.kind, src=one.src, dst=one.dst, error=reason))
        self.figures.skipped.setdefault("rest", "the measuring process was gone")


def run_measurements(
    task: Task,
    *,
    program: Sequence[str] = _PROGRAM,
    variables: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> Figures:
    """Figures of a task; a measurement that ends the process, or hangs it, has an error.

    Args:
        task: what to measure.
        program: what measures it, for tests.
        variables: of its environment, over those of this process.
        tell: is told what is measured now.
    """
    collector = Collector(tell)
    process = subprocess.Popen(
        program,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        env=child_environment(variables or {}),
        start_new_session=True,
    )
    try:
        reason = _listen(process, task, collector)
    finally:
        _end(process)
    if process.returncode and not reason:
        reason = f"the measuring process ended with status {process.returncode}"
    collector.break_off(reason or "the measuring process ended early")
    return collector.figures


def _listen(process: "subprocess.Popen[bytes]", task: Task, collector: Collector) -> str:
    """Take events until there are no more; why it stopped, where it was not by itself."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline_s = time.monotonic() + _START_S + task.budget_s + _GRACE_S
    try:
        process.stdin.write(msgspec.json.encode(task) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    buffered = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(max(deadline_s - time.monotonic(), 0.0)):
                return "it did not end in time, and its process was stopped"
            chunk = os.read(process.stdout.fileno(), _CHUNK_BYTES)
            if not chunk:
                return ""
            *lines, buffered = (buffered + chunk).split(b"\n")
            try:
                for line in lines:
                    collector.take(decode_event(line))
            except InvalidUsage as error:
                return str(error)
            if len(buffered) > _MAX_LINE_BYTES:
                return "the measuring process said a line without an end"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Close the pipes, give it a moment where it is ending, and stop it where it is not."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        _log.warning("the measuring process does not end; it is stopped")
        process.kill()
        process.wait()
