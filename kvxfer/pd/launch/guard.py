"""The guard of one process tree: ends it when the launcher goes, in whatever way, and leaves none.

``python -m kvxfer.pd.launch.guard WORDS...`` runs WORDS. Its standard input is a pipe that only the
launcher holds; the kernel closes it when the launcher dies. The guard is the reaper of everything
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

END_S: Final = 10.0  # an engine that was asked to end gives back gigabytes
REST_S: Final = 3.0  # then the rest of its tree
KILLED_S: Final = 5.0  # killed processes are gone once the kernel has undone their memory
_LOOK_S = 0.1
_STDIN = 0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(words: Sequence[str]) -> int:
    """Run ``words`` until it ends or standard input does; then nothing of it is left."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the launcher decides, by closing the pipe
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_follow_parent
    )
    while process.poll() is None and not _stdin_ended(_LOOK_S):
        pass
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _end_rest()
    code = process.returncode
    return code if code >= 0 else 128 - code


def _follow_parent() -> None:
    """For the case that the guard itself is killed. The handlers of exec'd words are defaults."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _stdin_ended(wait_s: float) -> bool:
    return bool(select.select([_STDIN], [], [], wait_s)[0]) and not os.read(_STDIN, 4096)


def _end_rest() -> None:
    """End what the process left: asked first, since resource trackers then clear /dev/shm."""
    asked: set[int] = set()
    killed_after_s = time.monotonic() + REST_S
    given_up_s = killed_after_s + KILLED_S
    while _reap() and time.monotonic() < given_up_s:
        kill = time.monotonic() >= killed_after_s
        for pid in _children():
            if kill or pid not in asked:
                asked.add(pid)
                _signal(pid, signal.SIGKILL if kill else signal.SIGTERM)
        time.sleep(0.02)


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
