"""``kvxfer pd experiment batching`` as a program, with a fake vLLM and its client."""

from pathlib import Path

import pytest
from pd_programs import Fake

from kvxfer.pd.experiment_result import load_result

pytest.importorskip("aiohttp", reason="the proxy needs it")


def test_a_set_up_is_measured_beside_what_is_simulated(tmp_path: Path) -> None:
    fake, out = Fake(tmp_path), tmp_path / "out"
    load = ("--setup", "mine=aggregated", "--request-rate", "4", "--duration", "5")
    done = fake.run("experiment", "batching", "--quick", *load, "--out", str(out))
    assert fake.running() == []
    found = load_result(out / "batching" / "experiment.json")
    by_how: dict[object, set[object]] = {}
    for name, how, *_ in found.tables[0].rows:
        by_how.setdefault(how, set()).add(name)
    assert by_how["measured"] == {"mine"}, done.stderr
    assert by_how["simulated"] == {
        "whole prompts", "chunks of 256", "chunks of 64", "prefill apart", "static", "dynamic",
        "parallel prefill", "long penalised", "long apart",
    }  # fmt: skip
    assert [one.name for one in found.figures] == ["blocking-measured", "blocking-simulated"]
    assert (out / "batching" / "index.html").is_file()
