"""`kvxfer sweep` where there is one GPU: both sides share it, and every row says so."""

from pathlib import Path

from sweep_runs import rows_of, sweep


def test_both_sides_on_one_gpu(tmp_path: Path) -> None:
    result = sweep(tmp_path, "--op", "put,get", "--devices", "0,0")
    rows = rows_of(tmp_path, result)
    assert [row["op"] for row in rows] == ["put", "get"]
    for row in rows:
        assert row["actual_path"].startswith("same device, ")
    assert ": same device, " in result.stdout
