"""Ctrl-C at every moment of the life of a program: nothing hangs, nothing is left running."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kvxfer.pd.launch import interrupts
from kvxfer.pd.launch.child import Child, all_ended, close_all

PROGRAM = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


class Moment:
    """Sends this process a signal when the n-th call of a C function, from 0, returns.

    The interpreter looks for signals there: an exception comes between the return of such a call
    and what the caller does with its result.
    """

    def __init__(self, number: int) -> None:
        self._left = number

    @contextmanager
    def awaited(self) -> Iterator[None]:
        gc.disable()  # what is raised in a callback of the collector is lost
        sys.setprofile(self._hook)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()

    @property
    def has_come(self) -> bool:
        return self._left < 0

    def _hook(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "c_return" and what is not sys.setprofile:
            self._left -= 1
            if self.has_come:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)


def start(folder: Path) -> Child:
    return Child("program", PROGRAM, environment=dict(os.environ), folder=folder)


def guards() -> list[int]:
    """Those of this process that are there."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            words = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == str(os.getpid()) and b"kvxfer.pd.launch.guard" in words:
            found.append(int(path.name))
    return found


def live(folder: Path, phase: str, moment: Moment) -> bool:
    """A program started, looked at and ended; returns whether Ctrl-C was raised."""

    def at(name: str) -> AbstractContextManager[None]:
        return moment.awaited() if name == phase else nullcontext()

    try:
        with all_ended():
            with at("start"):
                child = start(folder)
            with at("look"):
                child.poll()
            with at("end"):
                child.close()
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize(("phase", "step"), [("start", 29), ("look", 1), ("end", 5)])
def test_ctrl_c_at_any_moment_leaves_nothing(tmp_path: Path, phase: str, step: int) -> None:
    number = 0
    while (moment := Moment(number)) and live(tmp_path, phase, moment):
        assert moment.has_come
        assert guards() == []
        number += step
    assert not moment.has_come  # else it was lost
    assert number
    assert guards() == []


def test_the_check_sees_a_guard(tmp_path: Path) -> None:
    with start(tmp_path):
        assert len(guards()) == 1
    assert guards() == []


def test_the_first_signal_is_raised_and_no_other() -> None:
    again: list[int] = []

    def end_slowly() -> None:
        with interrupts.raised_once(lambda: again.append(1)):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                for _ in range(2):
                    signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        end_slowly()
    assert len(again) == 2


def test_what_is_held_is_raised_after_all_blocks() -> None:
    reached = []

    def hold() -> None:
        with interrupts.held(lambda: None):
            with interrupts.held(lambda: None):
                signal.raise_signal(signal.SIGINT)
                reached.append("inner")
            reached.append("outer")
        reached.append("after")

    with pytest.raises(KeyboardInterrupt):
        hold()
    assert reached == ["inner", "outer"]


def test_handlers_are_as_they_were_afterwards() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with interrupts.raised_once(lambda: None):
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before


def test_another_thread_ends_programs_and_leaves_signals_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    child = start(tmp_path)
    thread = threading.Thread(target=close_all, args=([child],))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) == before
    assert guards() == []
