"""``kvxfer pd`` as a program, beside a fake vLLM; and what it left running."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fake_vllm import PIDS, write_site
from free_ports import free_base
from waiting import eventually

DEADLINE_S = 60.0
OFFSETS = (0, 1, 100, 101, 200, 300, 400, 500, 700)  # the ports that a small set-up takes


class Fake:
    """A folder with a fake vLLM, and the processes that it started."""

    def __init__(self, folder: Path) -> None:
        self.site = write_site(folder / "site")
        self.pids = folder / "pids"
        self.pids.mkdir()
        self.base_port = free_base(OFFSETS)

    def words(self, command: str, *arguments: str) -> list[str]:
        ports = ["--port", str(self.base_port + 700), "--engine-ports", str(self.base_port)]
        return [sys.executable, "-m", "kvxfer", "pd", command, *ports, *arguments]

    def hide_vllm(self) -> None:
        """As on a machine without it."""
        blind = "import importlib.util as u; f = u.find_spec\n"
        blind += "u.find_spec = lambda n, *a: None if n == 'vllm' else f(n, *a)\n"
        (self.site / "sitecustomize.py").write_text(blind)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.site), PIDS: str(self.pids)}

    def run(self, command: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.words(command, *arguments),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            cwd="/",
            env=self.environment,
        )

    @contextmanager
    def started(self, command: str, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
        process = subprocess.Popen(
            self.words(command, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            env=self.environment,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()
            self.wait_gone()

    def running(self) -> list[int]:
        """Engines and workers that are still there."""
        return [int(path.name) for path in self.pids.iterdir() if is_running(int(path.name))]

    def has_happened(self, what: str) -> bool:
        """Whether an engine noted ``what``."""
        return (self.pids.parent / what).exists()

    def wait_for(self, what: str) -> None:
        """Until an engine notes ``what``."""
        eventually(lambda: self.has_happened(what), f"no engine {what}", DEADLINE_S)

    def wait_gone(self) -> list[int]:
        """What is left once nothing more ends, or at the deadline."""
        end_s = time.monotonic() + DEADLINE_S
        while (left := self.running()) and time.monotonic() < end_s:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return left


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
