"""Reuse served from stores by real vLLM engines: hits, answers and parts of each TTFT."""

import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_base
from pd_programs import OFFSETS

from kvxfer.cli.main import main
from kvxfer.pd.experiment_result import Bars, ExperimentResult, load_result
from kvxfer.pd.experiments.kv_reuse.record import ReuseRun, load_runs

_PROBE_S = 60.0
_HITS = (0, 512, 1024)


def require(module: str) -> None:
    """Skip where a module cannot be used here."""
    words = [sys.executable, "-c", f"import {module}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_PROBE_S, cwd="/")
    if done.returncode:
        reason = (done.stderr.strip() or "it ended").splitlines()[-1]
        pytest.skip(f"{module}: {reason}")


def measured(folder: Path, *setups: str) -> tuple[ExperimentResult, ReuseRun]:
    """What the quick experiment says, and the record of the set-up that has a store."""
    base = free_base((*OFFSETS, *range(401, 407)))
    ports = ("--port", str(base + 700), "--engine-ports", str(base), "--python", sys.executable)
    chosen = [word for text in setups for word in ("--setup", text)]
    words = ("--quick", *ports, *chosen, "--out", str(folder), "--logs", str(folder / "logs"))
    assert main(("pd", "experiment", "kv-reuse", *words)) == 0
    (run,) = (one for one in load_runs(folder / "kv-reuse" / "run") if one.setup.reuse != "none")
    return load_result(folder / "kv-reuse" / "experiment.json"), run


def check(found: ExperimentResult, run: ReuseRun) -> None:
    assert found.faults == []
    # Nothing was left out of the comparison of answers, and no request lacks its parts.
    assert len(found.notes) == 1
    assert [one.what for one in found.sources] == ["none", run.setup.name]
    assert len(found.tables[0].rows) == 2 * len(_HITS)
    (bars,) = found.figures[1].panels
    assert isinstance(bars, Bars)
    assert len(bars.bars) == len(_HITS)
    for one in run.asked:
        assert one.parts is not None
        assert (one.parts.transfer_s > 0.0) == (one.hit_tokens > 0)


def test_hits_from_mooncake_store(tmp_path: Path) -> None:
    require("mooncake.store")
    found, run = measured(tmp_path)
    assert run.setup.reuse == "mooncake"
    check(found, run)


def test_hits_from_a_far_server_of_lmcache(tmp_path: Path) -> None:
    require("lmcache")
    found, run = measured(
        tmp_path, "none=aggregated,reuse=none", "far=aggregated,reuse=lmcache-far"
    )
    check(found, run)
    for one in run.asked:
        assert (one.far_chunks, one.near_chunks) == (one.hit_tokens // 256, 0)
