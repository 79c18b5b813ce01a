"""How a sweep reports what its own checks have found."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvxfer.errors import KvxferError, NotAvailable, VerificationError
from kvxfer.sweep import SweepOptions, SweepRun
from kvxfer.sweep.result import SweepResult

OPTIONS = SweepOptions(
    transport="loopback", page_bytes=(4096,), total_bytes=1 << 20, memory=("private",)
)


def copy_nothing(*_: Any) -> str:
    return "memcpy"


def test_a_sweep_reports_wrong_bytes_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with SweepRun(replace(OPTIONS, iters=1)) as run:
        monkeypatch.setattr("kvxfer.transport.loopback.copy_mapped", copy_nothing)
        assert run.run_case(run.cases[0]) is None
        assert run.report.failed
        assert run.report.results == []
        (skipped,) = run.report.skipped
        assert skipped.failed
        assert "words are wrong at the destination" in skipped.reason
        monkeypatch.undo()
        assert run.run_case(run.cases[0]) is not None  # and goes on


@pytest.mark.parametrize(
    ("error", "ends"), [(NotAvailable("no such memory"), False), (KvxferError("broken"), True)]
)
def test_a_sweep_tells_what_is_missing_from_what_is_broken(
    monkeypatch: pytest.MonkeyPatch, error: KvxferError, ends: bool
) -> None:
    def fail(*_: Any) -> str:
        raise error

    with SweepRun(replace(OPTIONS, iters=1)) as run:
        monkeypatch.setattr("kvxfer.transport.loopback.copy_mapped", fail)
        if ends:
            with pytest.raises(KvxferError, match="broken"):
                run.run_case(run.cases[0])
        else:
            assert run.run_case(run.cases[0]) is None
        (skipped,) = run.report.skipped
        assert skipped.reason == str(error)
        assert run.report.failed == ends


@pytest.mark.parametrize(("asked", "fails"), [("nvlink", True), ("auto", False)])
def test_a_silent_fall_back_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, asked: str, fails: bool
) -> None:
    """No machine has NVLink and PCIe between two GPUs, so the path is read off a planted result."""
    with SweepRun(replace(OPTIONS, iters=1)) as run:
        measured = run.run_case(run.cases[0])
        assert measured is not None
        fallen = replace_path(measured, "pcie, bulk kernel put")
        monkeypatch.setattr(run, "_transport", "nvlink")
        monkeypatch.setattr(run, "_options", replace(OPTIONS, transport=asked))
        if fails:
            with pytest.raises(VerificationError, match="though nvlink was asked for"):
                run._judge_path(fallen)
        else:
            (note,) = run._judge_path(fallen).notes[-1:]
            assert note.startswith("the two GPUs share no NVLink")
        assert run._judge_path(replace_path(measured, "nvlink, bulk kernel put"))


def replace_path(result: SweepResult, path: str) -> SweepResult:
    return msgspec.structs.replace(result, actual_path=path)
