"""The guard of a process tree, with real processes of the worst manners."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pd_programs import DEADLINE_S, is_running

from kvxfer.pd.launch.child import Child

# A program whose worker has a session of its own, ignores SIGTERM, and outlives it.
PROGRAM = """
import os, signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c",
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('ready', flush=True); time.sleep(600)"],
    start_new_session=True, stdout=subprocess.PIPE)
worker.stdout.readline()
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(f"{os.getpid()} {worker.pid}", flush=True)
time.sleep(0 if "ends" in sys.argv else 600)
sys.exit(5)
"""


def start(folder: Path, *words: str) -> Child:
    return Child(
        "program",
        [sys.executable, "-c", PROGRAM, *words],
        environment=dict(os.environ),
        folder=folder,
    )


def pids_of(child: Child) -> list[int]:
    end_s = time.monotonic() + DEADLINE_S
    while not child.log.read_bytes().endswith(b"\n"):  # without a buffer, a line comes in pieces
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return [int(word) for word in child.tail(1)[0].split()]


def wait_gone(pids: list[int]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while any(map(is_running, pids)):
        assert time.monotonic() < end_s, f"{pids} still run"
        time.sleep(0.02)


@pytest.mark.parametrize("manners", [(), ("deaf",)])
def test_closing_leaves_nothing(tmp_path: Path, manners: tuple[str, ...]) -> None:
    with start(tmp_path, *manners) as child:
        pids = pids_of(child)
        assert all(map(is_running, pids))
    assert not any(map(is_running, pids))


def test_a_program_that_ends_takes_its_workers_along(tmp_path: Path) -> None:
    with start(tmp_path, "ends") as child:
        pids = pids_of(child)
        assert child.wait(DEADLINE_S) == 5
        assert not any(map(is_running, pids))


def test_the_status_of_a_signal_is_the_shells(tmp_path: Path) -> None:
    with start(tmp_path) as child:
        os.kill(pids_of(child)[0], signal.SIGKILL)
        assert child.wait(DEADLINE_S) == 128 + signal.SIGKILL


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = f"""
import os, sys, time
from pathlib import Path
from kvxfer.pd.launch.child import Child
child = Child("program", [sys.executable, "-c", {PROGRAM!r}],
              environment=dict(os.environ), folder=Path({str(tmp_path)!r}))
while not child.log.read_bytes().endswith(b"\\n"):
    time.sleep(0.02)
print(child.tail(1)[0], flush=True)
time.sleep(600)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True, cwd="/"
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    process.kill()
    process.communicate()
    wait_gone(pids)


def test_a_program_follows_a_guard_that_is_killed(tmp_path: Path) -> None:
    with start(tmp_path) as child:
        program, worker = pids_of(child)
        guard = int(Path(f"/proc/{program}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(guard, signal.SIGKILL)
        wait_gone([program])
        os.kill(worker, signal.SIGKILL)  # nobody is left to know of it: say so if this changes


def test_the_tail_is_the_end_of_the_log(tmp_path: Path) -> None:
    child = Child(
        "talks",
        [sys.executable, "-c", "print(*range(50), sep='\\n')"],
        environment=dict(os.environ),
        folder=tmp_path,
    )
    with child:
        assert child.wait(DEADLINE_S) == 0
    assert child.tail(2) == ["48", "49"]
