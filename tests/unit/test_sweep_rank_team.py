"""The processes of a sweep of ranks: errors name the rank, and no call waits for ever."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.errors import ControlTimeout, InvalidUsage, NotAvailable, PeerLost
from kvxfer.sweep import messages
from kvxfer.sweep.agent_process import AgentProcess
from kvxfer.sweep.ranks.team import RankTeam

# Far below the deadline that a call would have to wait for, far above what an end takes.
LONG_DEADLINE_S, SOON_S = 600.0, 60.0
NAMES = {0: "source rank 0 of 1", 1: "destination rank 0 of 2", 2: "destination rank 1 of 2"}
RELEASE = messages.Release()


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def gone(pid: int) -> bool:
    return state_of(pid) == "Z"


def stop(pid: int) -> None:
    """Silence a process; the signal alone takes a moment, in which it could still answer."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + SOON_S
    while state_of(pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.001)


def pids_of(team: RankTeam) -> list[int]:
    return [member._process.pid for member in team._members]  # type: ignore[attr-defined]


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankTeam]:
    """Whose calls wait for five seconds."""
    monkeypatch.setattr("kvxfer.sweep.agent.CALL_DEADLINE_S", 5.0)
    with RankTeam(3) as started:
        yield started


@pytest.fixture
def patient_team(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankTeam]:
    """Whose calls wait for minutes, and the ends of processes as long as it takes."""
    monkeypatch.setattr("kvxfer.sweep.agent.CALL_DEADLINE_S", LONG_DEADLINE_S)
    monkeypatch.setattr("kvxfer.sweep.ranks.team._DEATH_S", SOON_S)
    with RankTeam(3) as started:
        yield started


def test_processes_answer_and_end() -> None:
    with RankTeam(3) as team:
        pids = pids_of(team)
        assert len(set(pids)) == 3
        replies = team.call(dict.fromkeys(range(3), RELEASE), NAMES)
        assert replies == [messages.Ready()] * 3
        team.require_alive()
    assert all(map(gone, pids))


def test_an_error_names_the_rank_and_leaves_the_team_usable(patient_team: RankTeam) -> None:
    team = patient_team
    calls: dict[int, msgspec.Struct] = dict.fromkeys(range(3), RELEASE)
    with pytest.raises(InvalidUsage) as error:
        team.call({**calls, 2: messages.Fill(seed=1)}, NAMES)
    assert str(error.value).startswith("destination rank 1 of 2: nothing is prepared")
    assert team.call(calls, NAMES) == [messages.Ready()] * 3
    team.release(range(3), NAMES)


def test_a_rank_that_died_is_named_at_once(patient_team: RankTeam) -> None:
    pids = pids_of(patient_team)
    for pid in pids[:2]:
        stop(pid)
    killer = threading.Timer(0.2, os.kill, (pids[1], signal.SIGKILL))
    killer.start()
    start = time.monotonic()
    with pytest.raises(PeerLost, match=r"destination rank 0 of 2: .* ended with status -9"):
        patient_team.call({0: RELEASE, 1: RELEASE}, NAMES)
    with pytest.raises(PeerLost):
        patient_team.require_alive()
    patient_team.release(range(3), NAMES)  # does nothing, so does not wait for the silent one
    assert time.monotonic() - start < SOON_S
    killer.join()


@pytest.mark.parametrize("silent", [(0,), ()])
def test_a_rank_that_died_idle_ends_the_call_of_others(
    patient_team: RankTeam, silent: tuple[int, ...]
) -> None:
    pids = pids_of(patient_team)
    for index in silent:
        stop(pids[index])
    os.kill(pids[2], signal.SIGKILL)
    two = {index: NAMES[index] for index in (0, 1)}
    with pytest.raises(PeerLost) as error:
        call_for_a_while(patient_team, two)
    assert str(error.value) == (
        f"rank process 2, which has no part in this row: the peer process {pids[2]} ended with "
        "status -9"
    )
    patient_team.release(range(2), two)  # does not wait for the silent one


def test_a_rank_that_dies_while_others_settle_is_named(patient_team: RankTeam) -> None:
    pids = pids_of(patient_team)
    stop(pids[1])
    killer = threading.Timer(0.3, os.kill, (pids[2], signal.SIGKILL))
    killer.start()
    start = time.monotonic()
    with pytest.raises(PeerLost, match=r"^destination rank 1 of 2: .* status -9"):
        patient_team.call({0: messages.Fill(seed=1), 1: RELEASE}, NAMES)
    assert time.monotonic() - start < SOON_S
    killer.join()


def call_for_a_while(team: RankTeam, names: dict[int, str]) -> None:
    """Calls may be answered before the end of another process is seen."""
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        team.call(dict.fromkeys(names, RELEASE), names)


class Missing:
    """Notices that another is gone, and is first to say so."""

    def wait_ready(self) -> None:
        pass

    def call(self, message: msgspec.Struct) -> Any:
        raise PeerLost("there is no process 7")

    def require_alive(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_who_died_is_named_not_who_noticed(patient_team: RankTeam) -> None:
    pid = pids_of(patient_team)[2]
    patient_team._members[0] = Missing()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerLost, match=f"^destination rank 1 of 2: the peer process {pid} ended"):
        patient_team.call({0: RELEASE}, NAMES)


def test_where_none_died_who_failed_is_named(
    patient_team: RankTeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.sweep.ranks.team._DEATH_S", 0.05)
    patient_team._members[0] = Missing()
    with pytest.raises(PeerLost, match=r"^source rank 0 of 1: there is no process 7"):
        patient_team.call({0: RELEASE}, NAMES)


def test_a_silent_rank_is_named_at_the_deadline(team: RankTeam) -> None:
    pids = pids_of(team)
    stop(pids[2])
    with pytest.raises(ControlTimeout, match=r"destination rank 1 of 2: Release to .* after 5 s"):
        team.call(dict.fromkeys(range(3), RELEASE), NAMES)
    team.release(range(3), NAMES)
    start = time.monotonic()
    team.close()
    assert time.monotonic() - start < SOON_S
    assert all(map(gone, pids))


def call_and_release(team: RankTeam) -> None:
    """What a rig does, whatever comes; here it is Ctrl-C."""
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        team.call(dict.fromkeys(range(3), RELEASE), NAMES)
    finally:
        team.release(range(3), NAMES)


def test_ctrl_c_amid_a_call_ends_all(patient_team: RankTeam) -> None:
    pids = pids_of(patient_team)
    stop(pids[1])
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call_and_release(patient_team)
    patient_team.close()
    assert time.monotonic() - start < SOON_S
    assert all(map(gone, pids))


def test_of_a_failed_start_nothing_is_left() -> None:
    closed: list[Any] = []
    left = [1, 2, 3]

    class Started:
        def wait_ready(self) -> None:
            pass

        def close(self) -> None:
            closed.append(self)

    def start() -> Any:
        if left.pop() == 1:
            raise NotAvailable("no more processes")
        return Started()

    with pytest.raises(NotAvailable, match="no more processes"):
        RankTeam(3, start)
    assert len(closed) == 2


class Starts:
    """Starts processes, of which it keeps account."""

    def __init__(self, kind: type[AgentProcess] = AgentProcess) -> None:
        self._kind = kind
        self.processes: list[subprocess.Popen[str]] = []

    def __call__(self) -> AgentProcess:
        started = self._kind(wait=False)
        self.processes.append(started._process)
        return started


def test_a_rank_that_dies_at_the_start_is_named() -> None:
    starts = Starts()

    def start() -> AgentProcess:
        started = starts()
        if len(starts.processes) == 2:
            started._process.kill()
        return started

    with pytest.raises(NotAvailable) as error:
        RankTeam(3, start)
    pid = starts.processes[1].pid
    assert str(error.value).startswith(
        f"rank process 1 of 3: the peer process {pid} ended with status -9 before it was ready"
    )
    assert all(gone(process.pid) for process in starts.processes)


def test_ctrl_c_at_the_start_does_not_wait_until_all_are_ready() -> None:
    class Interrupted(AgentProcess):
        def wait_ready(self) -> None:
            raise KeyboardInterrupt

    starts = Starts(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        RankTeam(3, starts)
    assert [process.returncode for process in starts.processes] == [-signal.SIGKILL] * 3
