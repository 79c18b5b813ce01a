"""The command ``kvxfer diagnose``, run as a user runs it, and its report."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def diagnose(*options: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvxfer", "diagnose", *options],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd="/",
    )


def judged(option: str, folder: Path) -> tuple[dict[str, Any], dict[str, str], str]:
    """The report of a run on GPUs, its verdicts by check, and what the command printed."""
    path = folder / "report.json"
    done = diagnose(option, "--json", str(path), timeout_s=110.0)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(path.read_text())
    return report, {check["check"]: check["verdict"] for check in report["checks"]}, done.stdout
