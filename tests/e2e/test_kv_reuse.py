"""Reuse served from Mooncake Store by real vLLM engines: hits, answers and parts of each TTFT."""

import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_base
from pd_programs import OFFSETS

from kvxfer.cli.main import main
from kvxfer.pd.experiment_result import Bars, load_result
from kvxfer.pd.experiments.kv_reuse.record import load_runs

_PROBE_S = 60.0


def why_not() -> str:
    """Why Mooncake cannot be used here; empty where it can."""
    words = [sys.executable, "-c", "import mooncake.store"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_PROBE_S, cwd="/")
    return (done.stderr.strip() or "it ended").splitlines()[-1] if done.returncode else ""


def test_hits_from_mooncake_store(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"Mooncake Store: {reason}")
    base = free_base((*OFFSETS, 401, 402, 403))
    ports = ("--port", str(base + 700), "--engine-ports", str(base), "--python", sys.executable)
    words = ("--quick", *ports, "--out", str(tmp_path), "--logs", str(tmp_path / "logs"))
    assert main(("pd", "experiment", "kv-reuse", *words)) == 0
    found = load_result(tmp_path / "kv-reuse" / "experiment.json")
    assert found.faults == []
    # Nothing was left out of the comparison of answers, and no request lacks its parts.
    assert len(found.notes) == 1
    assert [one.what for one in found.sources] == ["none", "mooncake"]
    assert len(found.tables[0].rows) == 6
    (bars,) = found.figures[1].panels
    assert isinstance(bars, Bars)
    assert len(bars.bars) == 3
    store, _ = load_runs(tmp_path / "kv-reuse" / "run")
    for one in store.asked:
        assert one.parts is not None
        assert (one.parts.transfer_s > 0.0) == (one.hit_tokens > 0)
