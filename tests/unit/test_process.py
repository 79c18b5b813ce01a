"""Which process a peer is: ids come back, so an id alone is nobody."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer import _core
from kvxfer.errors import NotAvailable, PeerLost
from kvxfer.transport.process import ProcessSpec

_SLEEPER = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that waits for its input to close."""
    with start(_SLEEPER) as process:
        yield process


def start(code: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def start_ticks(pid: int) -> int:
    """Field 22 of the process's stat line, counted behind its name."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text[text.rindex(")") + 1 :].split()[19])


def changed(identity: _core.ProcessIdentity, **fields: int) -> _core.ProcessIdentity:
    known = {name: getattr(identity, name) for name in ("pid", "start_ticks", "pid_namespace")}
    return _core.ProcessIdentity(**(known | fields))


def test_the_caller_is_who_proc_says() -> None:
    found = _core.process_identity()
    assert found.pid == os.getpid()
    assert found.start_ticks == start_ticks(os.getpid())
    assert found.pid_namespace == Path("/proc/self/ns/pid").stat().st_ino
    _core.require_same_process(found)


def test_a_living_child_is_itself(child: "subprocess.Popen[bytes]") -> None:
    found = _core.process_identity(child.pid)
    assert found.pid == child.pid
    assert found.start_ticks == start_ticks(child.pid)
    assert found.pid_namespace == _core.process_identity().pid_namespace
    _core.require_same_process(found)


@pytest.mark.parametrize("name", ["a b", "(((", ") R 1 2 3 (", "x) S 4"])
def test_a_name_with_spaces_and_brackets_hides_nothing(name: str) -> None:
    code = f"open('/proc/self/comm', 'w').write({name!r}); {_SLEEPER}"
    with start(code) as process:
        assert f"({name})" in Path(f"/proc/{process.pid}/stat").read_text()
        found = _core.process_identity(process.pid)
        assert found.start_ticks == start_ticks(process.pid)
        _core.require_same_process(found)


@pytest.mark.parametrize("difference", [-1, 1, 1000])
def test_another_start_time_is_another_process(
    child: "subprocess.Popen[bytes]", difference: int
) -> None:
    real = _core.process_identity(child.pid)
    other = changed(real, start_ticks=real.start_ticks + difference)
    with pytest.raises(PeerLost, match=f"process {child.pid} is not the one.*its id was reused"):
        _core.require_same_process(other)


@pytest.mark.parametrize("inode", [0, 1, 4026531835])
def test_another_pid_namespace_cannot_be_reached(
    child: "subprocess.Popen[bytes]", inode: int
) -> None:
    other = changed(_core.process_identity(child.pid), pid_namespace=inode)
    with pytest.raises(NotAvailable, match=f"process {child.pid} lives in another pid names"):
        _core.require_same_process(other)
    # Whatever runs here under the same id is not looked at.
    with pytest.raises(NotAvailable, match=r"share it \(for containers: --pid\) or use a network"):
        _core.require_same_process(changed(other, pid=os.getpid()))


def test_a_process_is_lost_as_soon_as_it_is_dead(child: "subprocess.Popen[bytes]") -> None:
    real = _core.process_identity(child.pid)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    # Dead but not reaped: its number, its start time and its line in /proc are all still there.
    assert start_ticks(child.pid) == real.start_ticks
    with pytest.raises(PeerLost, match=f"process {child.pid} has ended"):
        _core.require_same_process(real)
    child.wait(30)
    with pytest.raises(PeerLost, match=f"there is no process {child.pid}"):
        _core.require_same_process(real)


@pytest.mark.parametrize("pid", [-1, (1 << 22) + 1])
def test_an_id_that_no_process_can_have_is_lost(pid: int) -> None:
    with pytest.raises(PeerLost, match=f"there is no process {pid}"):
        _core.process_identity(pid)


def test_the_identity_survives_the_wire() -> None:
    spec = ProcessSpec.own()
    spec.require_alive()
    identity = spec.identity()
    assert (identity.pid, identity.start_ticks, identity.pid_namespace) == (
        spec.pid,
        spec.start_ticks,
        spec.pid_namespace,
    )
    assert spec == ProcessSpec.own()
