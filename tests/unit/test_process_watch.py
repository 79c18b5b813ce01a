"""Whether a process has ended, told from any that only looks so."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from descriptors import few_descriptors
from leaks import num_fds

from kvxfer import _core
from kvxfer.errors import NotAvailable
from kvxfer.transport.process import ProcessWatch

GUARD_S = 60.0
SLEEPS = "import time; print(flush=True); time.sleep(60)"
# Ends its main thread alone: /proc calls the process a zombie, and another thread runs on.
HEADLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=[60]).start()
print(flush=True)
ctypes.CDLL(None).syscall(60, 0)
"""


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    children: list[subprocess.Popen[bytes]] = []

    def run(program: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child

    yield run
    for child in children:
        child.kill()
        child.communicate()


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def eventually(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_a_process_has_ended_before_and_after_it_is_reaped(
    start: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    child = start(SLEEPS)
    with ProcessWatch(_core.process_identity(child.pid)) as watch:
        assert not watch.has_ended
        child.kill()
        eventually(lambda: watch.has_ended)
        child.wait()
        assert watch.has_ended


def test_a_stopped_process_has_not_ended(start: Callable[[str], subprocess.Popen[bytes]]) -> None:
    child = start(SLEEPS)
    with ProcessWatch(_core.process_identity(child.pid)) as watch:
        os.kill(child.pid, signal.SIGSTOP)
        eventually(lambda: state_of(child.pid) == "T")
        assert not watch.has_ended


def test_a_process_without_its_main_thread_has_not_ended(
    start: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    child = start(HEADLESS)
    eventually(lambda: state_of(child.pid) == "Z")
    with open(f"/proc/{child.pid}/stat") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    own = _core.process_identity()
    identity = _core.ProcessIdentity(child.pid, ticks, own.pid_namespace)
    with ProcessWatch(identity) as watch:
        assert not watch.has_ended
        child.kill()
        eventually(lambda: watch.has_ended)


def test_a_successor_of_the_same_id_is_not_the_process() -> None:
    own = _core.process_identity()
    earlier = _core.ProcessIdentity(own.pid, own.start_ticks - 1, own.pid_namespace)
    with ProcessWatch(earlier) as watch:
        assert watch.has_ended


def test_of_another_pid_namespace_nothing_is_claimed(
    start: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    child = start(SLEEPS)
    here = _core.process_identity(child.pid)
    elsewhere = _core.ProcessIdentity(here.pid, here.start_ticks, here.pid_namespace + 1)
    with ProcessWatch(elsewhere) as watch:
        child.kill()
        child.wait()
        # The one that has ended only has the same number.
        assert not watch.has_ended


@pytest.mark.parametrize("num_left", [0, 1, 2])
def test_a_process_lives_on_while_descriptors_are_short(
    start: Callable[[str], subprocess.Popen[bytes]], num_left: int
) -> None:
    child = start(SLEEPS)
    identity = _core.process_identity(child.pid)
    _core.process_identity()  # what is known of oneself takes no descriptor
    with few_descriptors(num_left):
        watch = ProcessWatch(identity)
        assert not watch.has_ended
    with watch:
        assert not watch.has_ended
        child.kill()
        eventually(lambda: watch.has_ended)


def test_what_cannot_be_told_is_not_taken_for_the_end(
    start: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    identity = _core.process_identity(start(SLEEPS).pid)
    with few_descriptors(0), pytest.raises(NotAvailable, match=r"cannot tell.*Too many open"):
        _core.require_same_process(identity)


def test_who_is_forked_off_is_somebody_else() -> None:
    own = _core.process_identity()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, str(_core.process_identity().pid).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(os.read(reader, 64)) == pid != own.pid
    os.close(reader)
    os.close(writer)


def test_watches_leave_no_descriptor() -> None:
    before = num_fds()
    for _ in range(20):
        with ProcessWatch(_core.process_identity()) as watch:
            assert not watch.has_ended
        watch.close()
    assert num_fds() <= before
