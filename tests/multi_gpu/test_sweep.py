"""`kvxfer sweep` between two GPUs: rows that were checked, beside limits they do not pass."""

import re
from pathlib import Path

import pytest
from gpu_needs import array_library
from sweep_runs import rank_rows, rows_of, sweep, sweep_ranks


@pytest.mark.parametrize("devices", ["0,1", "1,0"])
def test_put_and_get_are_checked_and_within_the_physical_limit(
    tmp_path: Path, devices: str
) -> None:
    result = sweep(tmp_path, "--op", "put,get", "--devices", devices)
    rows = rows_of(tmp_path, result)
    assert [row["op"] for row in rows] == ["put", "get"]
    for row in rows:
        assert row["iters"] == 3
        assert row["actual_path"].startswith("nvlink, ")
    assert "every byte checked on the receiver" in result.stdout


@pytest.mark.parametrize("side", ["src", "dst"])
def test_compute_beside_a_transfer_is_slowed_by_a_figure(tmp_path: Path, side: str) -> None:
    array_library("torch")
    result = sweep(tmp_path, "--op", "put", "--with-compute", f"gemm@{side}", "--sms", "8")
    (row,) = rows_of(tmp_path, result)
    effect = row["compute"]
    assert (effect["kind"], effect["side"]) == ("gemm", side)
    assert effect["alone_us"] > 0
    assert effect["beside_us"] > 0
    pattern = rf"gemm on {side} beside \d+ GB/s \(8 SMs\): \d+ -> \d+ µs, [+-]\d+\.\d%"
    assert re.search(pattern, result.stdout), result.stdout


def test_a_gpu_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    result = sweep(tmp_path, "--devices", "0,99")
    assert result.returncode == 2
    assert "device 99; this process sees 0 to" in result.stderr


@pytest.mark.parametrize("op", ["put", "get"])
def test_ranks_of_two_sides_meet_over_nvlink(tmp_path: Path, op: str) -> None:
    result = sweep_ranks(tmp_path, "--op", op, "--tp", "2:1,1:2,4:2", "--devices", "0:1")
    rows = rank_rows(tmp_path, result)
    assert [(row["src_tp"], row["dst_tp"]) for row in rows] == [(2, 1), (1, 2), (4, 2)]
    for row in rows:
        assert row["actual_path"].startswith("nvlink, ")


def test_layouts_over_nvlink(tmp_path: Path) -> None:
    result = sweep_ranks(
        tmp_path,
        "--devices",
        "0:1",
        "--tp",
        "1:2",
        "--layouts",
        "order=nhd",
        "order=hnd",
        "lmcache",
    )
    rows = rank_rows(tmp_path, result)
    assert len(rows) == 3 * 3
    for row in rows:
        assert row["actual_path"].startswith("nvlink, ")
