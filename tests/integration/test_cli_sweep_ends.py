"""``kvxfer sweep`` that is interrupted, killed or left by its child."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Far above what the end of a sweep takes; the tests ask for life or death, not for speed.
GONE_S = 60.0
LONG = ("-v", "sweep", "--transport", "shm", "--memory", "shared", "--iters", "500")


class Running:
    """A long sweep in a session of its own, as a shell would start it.

    By default the first case takes a moment and is logged; the second would go on for a good while.
    """

    def __init__(self, file: Path, tokens: str = "16,1024") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvxfer", *LONG, "--tokens", tokens, "--json", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd="/",
        )
        self.child = 0

    def wait_for_the_first_result(self) -> None:
        """Until one case is measured and the long one is under way."""
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert "16 tokens" in line, line
        (self.child,) = self.children()
        time.sleep(0.3)  # into the next case; any moment must do

    def children(self) -> list[int]:
        pid = self.process.pid
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]

    def end(self) -> tuple[int, str, str]:
        """Its status and output, once it has ended by itself."""
        out, err = self.process.communicate(timeout=GONE_S)
        return self.process.returncode, out, err

    def close(self) -> None:
        for pid in (self.process.pid, self.child):
            if pid and not gone(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + GONE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "out.json"


@pytest.fixture
def running(file: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    sweep = Running(file, *getattr(request, "param", ()))
    yield sweep
    sweep.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_both_and_keeps_what_was_measured(
    running: Running, file: Path, number: signal.Signals
) -> None:
    running.wait_for_the_first_result()
    os.killpg(running.process.pid, number)
    status, out, err = running.end()
    assert status == 130
    assert wait_until(lambda: gone(running.child))
    assert "Traceback" not in err
    assert "interrupted: the table holds what was measured until then" in out
    document = json.loads(file.read_text())
    assert document["interrupted"] is True
    assert [row["num_tokens"] for row in document["results"]] == [16]


@pytest.mark.parametrize("running", [("1024",)], indirect=True, ids=["long"])
@pytest.mark.parametrize("delay_s", [0.1, 0.3, 0.5])
def test_ctrl_c_at_the_start_ends_it(running: Running, delay_s: float) -> None:
    time.sleep(delay_s)
    children = running.children()
    os.killpg(running.process.pid, signal.SIGINT)
    status, _, err = running.end()
    assert status != 0
    assert wait_until(lambda: all(map(gone, children)))
    if status == 130:  # else it came before the program's first line, as Python itself started
        assert "Traceback" not in err
        assert err.endswith("interrupted before the first result\n")


def test_the_child_ends_with_a_parent_that_was_killed(running: Running) -> None:
    running.wait_for_the_first_result()
    assert not gone(running.child)
    running.process.kill()
    assert wait_until(lambda: gone(running.child))


def test_a_child_that_was_killed_ends_the_sweep(running: Running, file: Path) -> None:
    running.wait_for_the_first_result()
    os.kill(running.child, signal.SIGKILL)
    status, out, err = running.end()
    assert status == 1
    assert f"the peer process {running.child} ended with status -9" in out
    assert err.splitlines()[-1].startswith("kvxfer sweep: ended by what is marked FAILED; 1 of 2")
    assert "Traceback" not in err
    document = json.loads(file.read_text())
    assert [row["num_tokens"] for row in document["results"]] == [16]
    assert document["skipped"][0]["failed"]
    assert "FAILED: shm/shared put llama-3.1-8b 1024 tokens" in out
