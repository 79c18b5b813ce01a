"""`kvxfer sweep` where there is one GPU: all ranks share it, and every row says so."""

from pathlib import Path

import pytest
from sweep_runs import rank_rows, rows_of, sweep, sweep_ranks


def test_both_sides_on_one_gpu(tmp_path: Path) -> None:
    result = sweep(tmp_path, "--op", "put,get", "--devices", "0,0")
    rows = rows_of(tmp_path, result)
    assert [row["op"] for row in rows] == ["put", "get"]
    for row in rows:
        assert row["actual_path"].startswith("same device, ")
    assert ": same device, " in result.stdout


@pytest.mark.parametrize("op", ["put", "get"])
def test_ranks_on_one_gpu(tmp_path: Path, op: str) -> None:
    result = sweep_ranks(tmp_path, "--op", op, "--tp", "2:1,1:2,4:3", "--devices", "0:0")
    rows = rank_rows(tmp_path, result)
    assert [(row["src_tp"], row["dst_tp"]) for row in rows] == [(2, 1), (1, 2), (4, 3)]
    for row in rows:
        assert row["actual_path"].startswith("same device, ")


def test_layouts_on_one_gpu(tmp_path: Path) -> None:
    result = sweep_ranks(tmp_path, "--layouts", "--devices", "0:0", "--tp", "2:1")
    rows = rank_rows(tmp_path, result)
    assert len(rows) == 6 * 7
    assert {row["convert"] for row in rows} == {"", "bfloat16 to fp8_e4m3"}
