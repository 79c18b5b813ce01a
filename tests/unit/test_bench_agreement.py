"""``bench/agreement.py`` compares the right figures; its copies need GPUs."""

import subprocess
import sys
from typing import Any

import pytest
from bench_scripts import load_script, script


def figure(kind: str, src: str, dst: str, gb_per_s: float, num_wrong: int = 0) -> dict[str, Any]:
    return {"kind": kind, "src": src, "dst": dst, "gb_per_s": gb_per_s, "num_wrong": num_wrong}


def report(engine: float, *, num_wrong: int = 0) -> dict[str, Any]:
    """NVML counts the two GPUs the other way round than CUDA does."""
    return {
        "facts": {"gpus": [{"index": 0, "cuda_index": 1}, {"index": 1, "cuda_index": 0}]},
        "figures": {
            "all": [
                figure("copy engine", "gpu1", "gpu0", engine, num_wrong),
                figure("copy engine", "gpu0", "gpu1", 1.0),
                figure("paged", "gpu1", "gpu0", 336.0),
                figure("latency", "gpu1", "gpu0", 0.0),
            ]
        },
    }


SWEEPS = {(0, 1): {"results": [{"limit_gb_per_s": 390.0, "gb_per_s": {"p50": 340.0}}]}}


def test_figures_of_the_same_pair_are_compared() -> None:
    module = load_script("agreement")
    rows = module.compare({(0, 1): [394.0, 398.0]}, report(396.0), SWEEPS)
    assert [(row.gb_per_s, row.reference_gb_per_s) for row in rows] == [
        (396.0, 396.0),
        (396.0, 390.0),
        (336.0, 340.0),
    ]
    assert all(module.agrees(row, 0.05) for row in rows)
    assert "DISAGREES" not in module.as_text(rows, 0.05)


def test_one_that_is_too_far_off_is_named() -> None:
    module = load_script("agreement")
    rows = module.compare({(0, 1): [396.0]}, report(360.0), SWEEPS)
    assert [module.agrees(row, 0.05) for row in rows] == [False, False, True]
    assert module.as_text(rows, 0.05).count("DISAGREES") == 2


def test_wrong_bytes_are_no_figure() -> None:
    module = load_script("agreement")
    with pytest.raises(RuntimeError, match="no figure of"):
        module.compare({(0, 1): [396.0]}, report(396.0, num_wrong=3), SWEEPS)


def test_without_gpus_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(script("agreement")), "--devices", "0,63"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert done.stderr
