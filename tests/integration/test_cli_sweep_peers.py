"""``kvxfer sweep --peers``, the real program with what every Linux has."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from kvxfer.sweep.cases import SweepOptions, expand_cases
from kvxfer.sweep.peers.task import PeerTask

DEADLINE_S = 60.0
GONE_S = 60.0
TINY = ("--transport", "shm", "--page-bytes", "16k", "--total-bytes", "2m", "--warmup", "0")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvxfer", "sweep", *TINY, *arguments]


def test_their_rows_stand_beside_ours(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    peers = "memcpy,process-vm,memcpy-batch"
    result = subprocess.run(
        command("--op", "put,get", "--iters", "2", "--peers", peers, "--json", str(file)),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd="/",
    )
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(file.read_text())
    assert [(row["transport"], row["op"], row["memory"]) for row in report["results"]] == [
        (transport, op, memory)
        for op in ("put", "get")
        for transport, memory in (
            ("shm", "shared"),
            ("shm", "private"),
            ("memcpy (peer)", "shared"),
            ("process-vm (peer)", "private"),
        )
    ]
    for row in report["results"]:
        assert row["verified"]
        assert (row["page_bytes"], row["total_bytes"], row["iters"]) == (16 << 10, 2 << 20, 2)
        assert bool(row["peer"]) == bool(row["settings"]) == ("peer" in row["transport"])
    assert "settings of process-vm (peer) put: 1024 pages a call" in result.stdout
    assert "skipped: memcpy-batch: moves pages in device memory" in result.stdout
    assert not report["skipped"][0]["failed"]


def started_by(pid: int) -> list[int]:
    """All processes under ``pid``."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    own = [int(child) for child in text.split()]
    return own + [one for child in own for one in started_by(child)]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_their_processes_end_with_the_sweep(number: int) -> None:
    arguments = ("--memory", "private", "--iters", "100000", "--peers", "process-vm")
    program = "import sys; from kvxfer.sweep import SweepRun; from kvxfer.cli import sweep; "
    # The row of the peer first: its processes are there from the start.
    program += "order = SweepRun.__init__\n"
    program += "def init(self, *given): order(self, *given); self.cases = self.cases[::-1]\n"
    program += "SweepRun.__init__ = init\nfrom kvxfer.cli.main import main; sys.exit(main())"
    sweep = subprocess.Popen(
        [sys.executable, "-c", program, *command(*arguments)[3:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
    )
    deadline = time.monotonic() + DEADLINE_S
    while len(found := started_by(sweep.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(found) == 3  # our far side, the library's process, its far side
    sweep.send_signal(number)
    sweep.communicate(timeout=GONE_S)
    deadline = time.monotonic() + GONE_S
    while any(map(is_alive, found)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in found if is_alive(pid)] == []


def test_a_library_that_hangs_is_ended() -> None:
    options = SweepOptions(transport="shm", page_bytes=(4096,), total_bytes=1 << 20)
    case = expand_cases(options, transport="shm")[0]
    task = PeerTask(case=case, devices=(-1, -1), num_threads=1, iters=1, warmup=0, seed=0)
    reader, writer = os.pipe()
    program = "import sys, time; from kvxfer.sweep.peers import main; main._ROUND_S = 0.2; "
    program += "main.measure_peer = lambda *_: time.sleep(600); sys.exit(main.main())"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(writer)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(writer,),
        cwd="/",
    ) as process:
        os.close(writer)
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(msgspec.json.encode(task) + b"\n")
        process.stdin.flush()
        assert process.wait(DEADLINE_S) == 1
        assert b"Timeout" in process.stderr.read()
    with os.fdopen(reader, "rb") as said:
        assert said.read() == b""
