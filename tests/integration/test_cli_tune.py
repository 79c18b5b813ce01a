"""``kvxfer tune`` as a command, and that what a profile says is what transports do."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from full_disk import largest_file
from tuning_profiles import profile_of, written

from kvxfer.cli.main import main
from kvxfer.env import child_environment
from kvxfer.sweep import SweepOptions, SweepRun
from kvxfer.sweep.tune import plan
from kvxfer.sweep.tune.rotation import compare
from kvxfer.sweep.tune.trials import again_of
from kvxfer.transport import available_transports
from kvxfer.transport.tuned import host_fingerprint
from kvxfer.tuning import Profile, Rule, Section, Slots, read_profile

MIB = 1 << 20
TIMEOUT_S = 100.0
STREAMING = Section(
    transport="shm", memory="shared", num_threads=1, rules=(Rule(op="put", engine="streaming"),)
)
RAW = SweepOptions(page_bytes=(16384,), total_bytes=MIB, iters=1, warmup=0)
_FOUND = available_transports()
network = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(not _FOUND[name].available, reason=_FOUND[name].reason),
        )
        for name in ("ucx", "nixl")
    ],
)


def rows(options: SweepOptions, *profiles: Profile) -> list[Any]:
    """One row under each profile, of the same two processes."""
    with SweepRun(options) as run:
        (case,) = run.cases
        found = [run.run_case(replace(case, tuning=profile)) for profile in profiles]
        assert run.report.skipped == []
        return found


def test_a_profile_sets_threads_and_engine_of_shm() -> None:
    options = replace(RAW, transport="shm", memory=("shared",))
    by_default, tuned = rows(options, profile_of(), profile_of(STREAMING))
    assert by_default.actual_path == "shared segment, memcpy"
    assert tuned.actual_path == "shared segment, streaming"
    assert tuned.num_threads == 1
    # What is asked for comes first.
    (asked,) = rows(replace(options, engine="memcpy", num_threads=2), profile_of(STREAMING))
    assert (asked.actual_path, asked.num_threads) == ("shared segment, memcpy", 2)


def test_a_rule_of_another_size_or_operation_changes_nothing() -> None:
    options = replace(RAW, transport="shm", memory=("shared",))
    for fields in ({"max_run_bytes": 16384}, {"min_total_bytes": MIB + 1}, {"op": "get"}):
        rule = msgspec.structs.replace(STREAMING.rules[0], **fields)
        section = msgspec.structs.replace(STREAMING, rules=(rule,))
        (row,) = rows(options, profile_of(section))
        assert row.actual_path == "shared segment, memcpy"


@network
def test_a_profile_sets_slots_and_threads_of_a_network(name: str) -> None:
    slots = Slots(place="host", num_slots=3, slot_bytes=MIB // 4)
    section = Section(
        transport=name,
        memory="private",
        num_threads=1,
        slots=(slots,),
        rules=(Rule(op="put", engine="staged"),),
    )
    options = replace(RAW, transport=name, memory=("private",))
    by_default, tuned, elsewhere = rows(
        options,
        profile_of(),
        profile_of(section),
        profile_of(section, fingerprint=host_fingerprint()),
    )
    assert by_default.slots == Slots(place="host", num_slots=4, slot_bytes=2 * MIB)
    assert (tuned.slots, tuned.num_threads) == (slots, 1)
    assert elsewhere.slots == by_default.slots  # of another version of the library


def test_transports_are_compared_at_the_same_points() -> None:
    sizes = replace(plan._QUICK_NETWORK, total_bytes=(MIB,), iters=1, repeats=2)
    areas = [plan.Area("shm", "private"), plan.Area("loopback", "private")]
    measured: list[None] = []
    trials = compare(areas, sizes, profile_of(), lambda: measured.append(None))
    assert len(measured) == 2 * 2 * sizes.repeats
    for name in ("shm", "loopback"):
        (point,) = trials.points_of(name)
        assert (point.run_bytes, point.total_bytes) == (16384, MIB)
        repeats = trials.repeats(name, point, default="shm", again=again_of("shm"))
        assert repeats is not None
        assert len(repeats.candidate_us) == sizes.repeats


def sweep(folder: Path, **environment: str) -> dict[str, Any]:
    """The report of a sweep in a process of its own."""
    words = ["--transport", "shm", "--memory", "shared", "--page-bytes", "16k", "--iters", "1"]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "kvxfer",
            "sweep",
            *words,
            "--total-bytes",
            "1m",
            "--json",
            "r.json",
        ],
        cwd=folder,
        env=child_environment({"XDG_CONFIG_HOME": str(folder / "config"), **environment}),
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
    )
    report: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return report


def test_the_profile_of_the_default_place_is_used_and_off_wins(tmp_path: Path) -> None:
    written(tmp_path / "config" / "kvxfer", STREAMING)
    report = sweep(tmp_path, KVXFER_TUNING="")
    assert report["results"][0]["actual_path"] == "shared segment, streaming"
    assert report["results"][0]["num_threads"] == 1
    assert report["environment"]["tuning"] == "profile of 2026-11-30T00:00:00Z"
    report = sweep(tmp_path, KVXFER_TUNING="off")
    assert report["results"][0]["actual_path"] == "shared segment, memcpy"
    assert report["environment"]["tuning"] == "defaults"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One point, two repeats."""
    sizes = replace(plan._QUICK_HOST, page_bytes=(16384,), total_bytes=(MIB,), iters=1, repeats=2)
    monkeypatch.setattr(plan, "_QUICK_HOST", sizes)


@pytest.mark.usefixtures("tiny")
def test_a_profile_is_measured_written_shown_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "new" / "tuning.json")]
    assert main(["tune", "--quick", "--transport", "shm", *out]) == 0
    text = capsys.readouterr().out
    assert "every byte checked" in text
    assert "2 points: " in text
    profile = read_profile(tmp_path / "new" / "tuning.json")
    assert profile is not None
    assert profile.fingerprint.libraries.keys() <= {"ucx", "nixl"}
    assert [(check.transport, check.memory) for check in profile.checks] == [
        ("shm", "shared"),
        ("shm", "private"),
    ]
    assert {check.total_bytes for check in profile.checks} == {MIB}
    assert main(["tune", "--check", *out]) == 0
    assert "is of this machine" in capsys.readouterr().out
    assert main(["tune", "--show", *out]) == 0
    assert "2 points: " in capsys.readouterr().out


def test_ranks_are_measured_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = replace(
        plan._HOST,
        page_bytes=(16384,),
        total_bytes=(MIB,),
        ops=("put",),
        rank_tokens=(16,),
        iters=1,
        repeats=1,
    )
    monkeypatch.setattr(plan, "_HOST", sizes)
    monkeypatch.setattr(plan, "_threads", tuple)
    monkeypatch.setattr(
        "kvxfer.sweep.tune.run.areas_of", lambda *_, **__: [plan.Area("shm", "shared")]
    )
    assert main(["tune", "--transport", "shm", "--out", str(tmp_path / "tuning.json")]) == 0
    profile = read_profile(tmp_path / "tuning.json")
    assert profile is not None
    assert [(check.src_tp, check.dst_tp) for check in profile.checks] == [(1, 1), (2, 1)]
    pair, ranks = profile.checks
    assert (pair.run_bytes, pair.total_bytes) == (16384, MIB)
    # 16 tokens of llama-3.1-8b are 2 MiB, of which each of two ranks moves half to one.
    assert (ranks.run_bytes, ranks.total_bytes) == (1024, MIB)


@pytest.mark.parametrize("field", ["driver", "system"])
def test_check_fails_for_another_machine(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = msgspec.structs.replace(host_fingerprint(), **{field: "another"})
    path = written(tmp_path, STREAMING, fingerprint=other)
    assert main(["tune", "--check", "--out", str(path)]) == 1
    assert f"{field} is another in the profile" in capsys.readouterr().err


def test_check_fails_for_another_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = Section(transport="nixl", memory="private", num_threads=1)
    path = written(tmp_path, section, fingerprint=host_fingerprint({"nixl": "0.0.1"}))
    assert main(["tune", "--check", "--out", str(path)]) == 1
    assert "nixl is 0.0.1 in the profile" in capsys.readouterr().err


def test_check_fails_for_another_library_of_the_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = host_fingerprint({"nixl": "0.0.1"})
    path = written(tmp_path, order={"host": ("nixl", "shm")}, fingerprint=other)
    assert main(["tune", "--check", "--out", str(path)]) == 1
    assert "nixl is 0.0.1 in the profile" in capsys.readouterr().err


def test_where_nothing_can_be_written_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(_: object) -> NoReturn:
        raise AssertionError

    monkeypatch.setattr("kvxfer.cli.tune._measure", never)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc")
    monkeypatch.setenv("KVXFER_TUNING", "")
    for out in ([], ["--out", "/dev/null"]):
        assert main(["tune", "--quick", *out]) == 2
        assert "cannot write '/" in capsys.readouterr().err


def test_a_full_disk_takes_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvxfer.cli.tune._measure", lambda _: profile_of(STREAMING))
    old = written(tmp_path)
    before = old.read_bytes()
    with largest_file(10):
        assert main(["tune", "--out", str(old)]) == 2
    out, err = capsys.readouterr()
    assert "streaming" in out
    assert "File too large" in err
    assert old.read_bytes() == before


def test_what_cannot_be_done_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["tune", "--check", "--out", str(tmp_path / "none.json")]) == 3
    assert "there is no profile" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{")
    assert main(["tune", "--show", "--out", str(tmp_path / "bad.json")]) == 1
    assert "it is no profile" in capsys.readouterr().err
    assert main(["tune", "--transport", "loopback", "--out", str(tmp_path / "t.json")]) == 2
    assert "use nvlink or shm or nixl or ucx" in capsys.readouterr().err
    assert main(["tune", "--out", ""]) == 2
    monkeypatch.setenv("KVXFER_TUNING", "off")
    assert main(["tune"]) == 2
    assert "KVXFER_TUNING is off" in capsys.readouterr().err


def test_env_says_which_profile_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, STREAMING)
    program = [sys.executable, "-m", "kvxfer", "env"]
    found = subprocess.run(
        program,
        env=child_environment({"KVXFER_TUNING": str(path), "COLUMNS": "200"}),
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    assert f"{path}, of 2026-11-30T00:00:00Z" in found.stdout
