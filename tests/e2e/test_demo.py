"""``kvxfer pd demo`` with real vLLM: started, asked, measured, reported, and nothing left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_base
from pd_programs import OFFSETS
from waiting import eventually

from kvxfer.pd.result import find_points, load_point, load_setup

pytest.importorskip("aiohttp", reason="the proxy needs it")

LIMIT_S = 900.0  # four minutes on two idle cores


def left_over(logs: Path) -> list[str]:
    """Programs whose command line names the folder of logs and models."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(logs) in words and path.parent.name != str(os.getpid()):
            found.append(words)
    return found


@pytest.mark.timeout(LIMIT_S)
def test_the_demonstration_runs_to_its_report(tmp_path: Path) -> None:
    out, logs, base = tmp_path / "out", tmp_path / "logs", free_base(OFFSETS)
    ports = ("--port", str(base + 700), "--engine-ports", str(base))
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer", "pd", "demo", *ports, "--out", out, "--logs", logs],
        capture_output=True,
        text=True,
        timeout=LIMIT_S - 30,
        cwd="/",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answer of the decode engine: '" in done.stdout
    assert "hand-over P50" in done.stdout  # the report's
    assert left_over(logs) == []
    for name, num_points in (("pd", 2), ("prefill-alone", 1), ("aggregated", 2)):
        points, cut_off = find_points(out / name)
        assert (len(points), cut_off) == (num_points, [])
        assert load_setup(out / name).name == name
        assert all(load_point(path).findings == [] for path in points)


def test_the_check_sees_what_is_left(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(600)", str(tmp_path)]
    process = subprocess.Popen(words, cwd="/")
    try:
        eventually(lambda: left_over(tmp_path) != [], "a program that runs is not seen")
    finally:
        process.kill()
        process.wait()
    assert left_over(tmp_path) == []
