"""`kvxfer sweep` as a command, and what must hold of every row between GPUs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# Of ranks: small, since each rank takes its time to meet the GPU.
RANKS = ["--transport", "nvlink", "--tokens", "512", "--iters", "3"]
RAW = ["--transport", "nvlink", "--page-bytes", "16k", "--iters", "3", "--total-bytes", "64m"]
_TIMEOUT_S = 110


def sweep(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a short raw sweep."""
    return _sweep(folder, *RAW, *options)


def sweep_ranks(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a short sweep of ranks."""
    return _sweep(folder, *RANKS, *options)


def _sweep(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """In a folder where no source of kvxfer lies, as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "kvxfer", "sweep", "--json", "report.json", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )


def rows_of(folder: Path, result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Its rows, after every one was found checked and within its limits."""
    rows = _rows(folder, result)
    for row in rows:
        assert row["page_bytes"] == 16 << 10
        assert row["total_bytes"] == 64 << 20
    return rows


def rank_rows(folder: Path, result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The same of a sweep of ranks."""
    rows = _rows(folder, result)
    for row in rows:
        assert row["num_runs"] * row["run_bytes"] >= row["total_bytes"]
        assert row["rank_spread"] >= 1
    return rows


def _rows(folder: Path, result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    report = json.loads((folder / "report.json").read_text())
    assert report["skipped"] == []
    rows: list[dict[str, Any]] = report["results"]
    assert rows
    for row in rows:
        assert row["verified"] is True
        assert row["memory"] == "device"
        assert row["limit_gb_per_s"] > 0
        physical = row["physical_limit_gb_per_s"]
        assert physical is not None
        assert max(row["gb_per_s"]["max"], row["limit_gb_per_s"]) <= physical
    return rows
