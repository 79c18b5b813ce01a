"""``kvxfer pd experiment kv-reuse``, the real program, with a fake vLLM and no store."""

from pathlib import Path

import pytest
from pd_programs import Fake

from kvxfer.pd.experiment_result import load_result

pytest.importorskip("aiohttp", reason="what `kvxfer pd` starts needs it")

SETUPS = ("none=aggregated,reuse=none", "mooncake=aggregated,reuse=mooncake")


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_a_store_that_is_not_installed_is_a_fault_and_the_rest_is_measured(
    fake: Fake, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    setups = [word for text in SETUPS for word in ("--setup", text)]
    words = ("kv-reuse", "--quick", *setups, "--hits", "0,256", "--out", str(out))
    done = fake.run("experiment", *words)
    assert done.returncode == 1, done.stderr
    found = load_result(out / "kv-reuse" / "experiment.json")
    (fault,) = found.faults
    assert fault.startswith("mooncake: ")
    assert "pip install mooncake-transfer-engine-non-cuda" in fault
    assert [row[:2] for row in found.tables[0].rows] == [["none", "0"], ["none", "256"]]
    assert fake.running() == []
    record = out / "kv-reuse" / "run" / "none" / "reuse.json"
    before = record.read_bytes()
    again = fake.run("experiment", *words)
    assert again.returncode == 1
    assert "none: starting" not in again.stderr
    assert record.read_bytes() == before
