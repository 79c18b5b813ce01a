"""An experiment with real vLLM engines: measured, recorded, and drawn where matplotlib is."""

import sys
from importlib.util import find_spec
from pathlib import Path

from free_ports import free_base
from pd_programs import OFFSETS

from kvxfer.cli.main import main
from kvxfer.pd.experiment_result import load_result


def test_aggregated_against_pd(tmp_path: Path) -> None:
    base = free_base(OFFSETS)
    ports = ("--port", str(base + 700), "--engine-ports", str(base), "--python", sys.executable)
    words = ("--quick", "--concurrency", "4", *ports, "--out", str(tmp_path))
    assert main(("pd", "experiment", "agg-vs-pd", *words)) == 0
    found = load_result(tmp_path / "agg-vs-pd" / "experiment.json")
    assert [(one.what, one.how) for one in found.sources] == [
        ("agg", "measured"),
        ("pd", "measured"),
    ]
    assert found.faults == []
    assert [len(row) for row in found.tables[0].rows] == [len(found.tables[0].columns)] * 2
    if find_spec("matplotlib") is not None:
        assert (tmp_path / "agg-vs-pd" / "index.html").stat().st_size > 10_000
