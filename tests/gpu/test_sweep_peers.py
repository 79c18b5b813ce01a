"""What others use to copy between GPUs, beside kvxfer in one sweep: two processes, one GPU."""

from pathlib import Path

import pytest
from sweep_runs import rows_of, sweep

PEERS = "memcpy,memcpy-batch"


@pytest.mark.parametrize("op", ["put", "get"])
def test_copies_of_the_driver(tmp_path: Path, op: str) -> None:
    result = sweep(tmp_path, "--op", op, "--devices", "0,0", "--sms", "8,16", "--peers", PEERS)
    rows = rows_of(tmp_path, result)
    assert [row["transport"] for row in rows[:3]] == ["nvlink", "nvlink", "memcpy (peer)"]
    names = [row["actual_path"].removesuffix("_v2") for row in rows if row["peer"]]
    assert names == ["cuMemcpyAsync", "cuMemcpyBatchAsync"]


def test_host_ways_are_a_reason(tmp_path: Path) -> None:
    result = sweep(tmp_path, "--devices", "0,0", "--peers", "process-vm,mooncake")
    assert "skipped: process-vm: moves pages in private or shared memory" in result.stdout
    assert "skipped: mooncake: moves pages in private or shared memory" in result.stdout
