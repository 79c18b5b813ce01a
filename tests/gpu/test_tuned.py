"""What a tuning profile says is what GPUs' copies do, and `kvxfer tune` runs on one GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
from tuning_profiles import profile_of

from kvxfer.cli.main import main
from kvxfer.sweep import SweepOptions, SweepRun
from kvxfer.sweep.tune import plan
from kvxfer.tuning import Rule, Section, read_profile

MIB = 1 << 20
OPTIONS = SweepOptions(
    transport="nvlink",
    memory=("device",),
    page_bytes=(16384,),
    total_bytes=16 * MIB,
    iters=2,
    warmup=0,
    devices=(0, 0),
)


def nvlink(**fields: object) -> Section:
    rule = Rule(op="put", **fields)  # type: ignore[arg-type]
    return Section(transport="nvlink", memory="device", rules=(rule,))


def test_a_profile_sets_sms_and_engine() -> None:
    profiles = (
        profile_of(),
        profile_of(nvlink(num_sms=5)),
        profile_of(nvlink(engine="load_store", num_sms=6)),
        profile_of(nvlink(engine="dma")),
    )
    with SweepRun(OPTIONS) as run:
        (case,) = run.cases
        rows = [run.run_case(replace(case, tuning=profile)) for profile in profiles]
        assert run.report.skipped == []
    found = [(row.sm_count, row.actual_path) for row in rows if row is not None]
    assert found == [
        (8, "same device, bulk kernel put"),
        (5, "same device, bulk kernel put"),
        (6, "same device, load/store kernel put"),
        (8, "same device, copy engine put"),  # a budget that it leaves alone
    ]


def test_one_gpu_is_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = replace(
        plan._QUICK_DEVICE, page_bytes=(16384,), total_bytes=(16 * MIB,), iters=2, repeats=2
    )
    monkeypatch.setattr(plan, "_QUICK_DEVICE", sizes)
    path = tmp_path / "tuning.json"
    assert main(["tune", "--quick", "--transport", "nvlink", "--out", str(path)]) == 0
    profile = read_profile(path)
    assert profile is not None
    assert profile.fingerprint.gpus
    assert profile.fingerprint.driver
    assert [(check.transport, check.memory) for check in profile.checks] == [("nvlink", "device")]
