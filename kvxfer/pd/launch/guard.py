"""The guard of one process tree: ends it when the launcher goes, in whatever way, and leaves none.

``python -m kvxfer.pd.launch.guard WORDS...`` runs WORDS. Its standard input is a pipe that only the
launcher holds: :data:`END` asks for the end, :data:`KILL` for an end without patience, and where
the launcher dies the kernel closes it, which is like END. The guard is the reaper of everything
below it (PR_SET_CHILD_SUBREAPER, see prctl(2)), so that it finds workers whose parent is gone, also
those with a session of their own. Its exit status is that of WORDS, 128 + n for signal n.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

END: Final = b"e"
KILL: Final = b"k"
END_S: Final = 10.0  # an engine that was asked to end gives back gigabytes
REST_S: Final = 3.0  # then the rest of its tree
KILLED_S: Final = 5.0  # killed processes are gone once the kernel has undone their memory
LONGEST_S: Final = END_S + KILLED_S + REST_S + KILLED_S
_LOOK_S = 0.1
_LOOK_ENDING_S = 0.02
_STDIN = 0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class _Launcher:
    """What the launcher has said."""

    def __init__(self) -> None:
        self.wants_end = False
        self.wants_kill = False
        self._is_gone = False

    def listen(self, wait_s: float) -> None:
        """Wait for a word of it, ``wait_s`` at most."""
        if self._is_gone:
            time.sleep(wait_s)
        elif select.select([_STDIN], [], [], wait_s)[0]:
            said = os.read(_STDIN, 4096)
            self._is_gone = not said
            self.wants_end = True
            self.wants_kill = self.wants_kill or KILL in said


def main(words: Sequence[str]) -> int:
    """Run ``words`` until it ends or the launcher wants that; then nothing of it is left."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the launcher decides, through the pipe
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_follow_parent
    )
    launcher = _Launcher()
    while process.poll() is None and not launcher.wants_end:
        launcher.listen(_LOOK_S)
    if process.poll() is None:
        _end(process, launcher)
    _end_rest(launcher)
    code = -signal.SIGKILL if process.returncode is None else process.returncode
    return code if code >= 0 else 128 - code


def _follow_parent() -> None:
    """For the case that the guard itself is killed. The handlers of exec'd words are defaults."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end(process: "subprocess.Popen[bytes]", launcher: _Launcher) -> None:
    """Ask the program to end, and kill it where it does not in time."""
    process.terminate()
    killed_after_s = time.monotonic() + END_S
    while process.poll() is None:
        if launcher.wants_kill or time.monotonic() >= killed_after_s:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)
            return
        launcher.listen(_LOOK_ENDING_S)


def _end_rest(launcher: _Launcher) -> None:
    """End what the process left: asked first, since resource trackers then clear /dev/shm."""
    asked: set[int] = set()
    killed_after_s = time.monotonic() + REST_S
    given_up_s = killed_after_s + KILLED_S
    while _reap() and time.monotonic() < given_up_s:
        kill = launcher.wants_kill or time.monotonic() >= killed_after_s
        for pid in _children():
            if kill or pid not in asked:
                asked.add(pid)
                _signal(pid, signal.SIGKILL if kill else signal.SIGTERM)
        launcher.listen(_LOOK_ENDING_S)


def _reap() -> bool:
    """Take the status of children that ended; returns whether any are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _children() -> list[int]:
    """Direct children; those of a child that ends become direct ones."""
    own = str(os.getpid())
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state parent ...; the name may hold anything, also brackets.
            parent = path.read_text(errors="replace").rpartition(")")[2].split()[1]
        except OSError:
            continue
        if parent == own:
            found.append(int(path.parent.name))
    return found


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
