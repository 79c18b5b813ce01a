"""The command ``kvxfer diagnose`` as a user runs it: its files and its exit status."""

import json
from pathlib import Path

import pytest
from captures import write_capture
from diagnose_command import diagnose


def test_this_machine_is_diagnosed(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("report.json", "report.html", "kvxfer.prom")]
    flags = ("--json", "--html", "--prometheus")
    options = [word for pair in zip(flags, map(str, paths), strict=True) for word in pair]
    done = diagnose("--quick", *options)
    report = json.loads(paths[0].read_text())
    verdicts = {check["check"]: check["verdict"] for check in report["checks"]}
    bad = {"WARN", "FAIL"} & set(verdicts.values())
    assert done.returncode == int(bool(bad)), done.stderr
    assert report["schema"] == "kvxfer.diagnose/1"
    assert verdicts["bytes"] == "PASS"
    assert {figure["kind"] for figure in report["figures"]["all"]} >= {"memcpy", "paged memcpy"}
    assert 'check_verdict{check="bytes"} 1.0' in paths[2].read_text()
    assert paths[1].read_text().startswith("<!doctype html>")
    if not report["facts"]["gpus"]:
        assert verdicts["pair-rate"] == "N/A"
        assert "no GPU" in done.stdout


@pytest.mark.parametrize(
    ("name", "status"),
    [("hgx_h100", 0), ("link_down", 1), ("cuda_error_802", 1), ("mig_on", 1), ("no_driver", 1)],
)
def test_a_captured_node(name: str, status: int, tmp_path: Path) -> None:
    done = diagnose("--from", str(write_capture(name, tmp_path / name)))
    assert done.returncode == status, done.stdout + done.stderr
    assert ("remedy:" in done.stdout) == bool(status)


def test_nothing_to_test(tmp_path: Path) -> None:
    (tmp_path / "sysfs.txt").write_text("/proc/sys/kernel/osrelease:6.8.0\n")
    assert diagnose("--from", str(tmp_path)).returncode == 3
    done = diagnose("--from", str(write_capture("cpu_only", tmp_path / "cpu_only")))
    assert done.returncode == 3
    assert "no GPU here" in done.stdout
    assert "PASS" not in done.stdout


def test_a_capture_is_judged_alike_here_and_elsewhere(tmp_path: Path) -> None:
    folder, here, there = (str(tmp_path / name) for name in ("capture", "here", "there"))
    first = diagnose("--capture", folder, "--json", here)
    second = diagnose("--from", folder, "--json", there)
    # Nothing to test is 3 of a diagnosis, and no fault of a capture, which is written.
    assert first.returncode == (0 if second.returncode == 3 else second.returncode)
    assert (first.stderr, second.stderr) == (f"kvxfer: wrote the capture to {folder!r}\n", "")
    one, other = (json.loads(Path(path).read_text()) for path in (here, there))
    assert one["checks"] == other["checks"]
    assert one["figures"]["all"] == []
    assert one["facts"]["host"]["num_cpus"] == other["facts"]["host"]["num_cpus"] > 0
    again = diagnose("--capture", folder, "--json", "-")
    assert "in place of the capture that was there" in again.stderr
    assert json.loads(again.stdout)["checks"] == one["checks"]


def test_a_capture_replaces_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    done = diagnose("--capture", str(tmp_path))
    assert done.returncode == 2
    assert "holds 'thesis.txt', which --capture did not write; name a folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_drift_against_an_older_report(tmp_path: Path) -> None:
    old = str(tmp_path / "old.json")
    assert diagnose("--from", str(write_capture("hgx_h100", tmp_path / "a")), "--json", old)
    same = diagnose("--from", str(write_capture("hgx_h100", tmp_path / "b")), "--compare", old)
    assert same.returncode == 0, same.stdout
    worse = diagnose("--from", str(write_capture("link_down", tmp_path / "c")), "--compare", old)
    assert worse.returncode == 1
    assert "worse: NVLinks of GPU 5: 18 -> 17" in worse.stdout
    assert "worse: check nvlink-links: PASS -> FAIL" in worse.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--from", "/no/such/folder"), "is no folder"),
        (("--quick", "--gentle"), "not allowed with"),
        (("--quick", "--from", "/tmp"), "a capture has none"),
        (("--compare", "/no/such.json"), "cannot read"),
        (("--json", "/no/such/folder/x"), "there is no folder"),
        (("--json", "/tmp/same", "--html", "/tmp/same"), "given for two outputs"),
    ],
)
def test_wrong_usage(options: tuple[str, ...], words: str) -> None:
    done = diagnose(*options)
    assert done.returncode == 2
    assert words in done.stderr
    assert not done.stdout
