"""Captured nodes are judged right: each folder of ``tests/data/diagnose`` is one.

Those named ``seen_`` are public outputs, whose address is their source; host names, serials and
process ids are replaced, and what is cut or composed around them is said. Those named ``own_`` are
captures of kvxfer itself, likewise. The others are composed
in such shapes. ``expected.json`` says what each shows, the verdict of its checks, words of a
finding or of the evidence, and of a matrix some paths and all NUMA nodes.
"""

from pathlib import Path
from typing import Any

import pytest
from captures import CASES, expected_of, write_capture

from kvxfer.diagnose.facts import Facts
from kvxfer.diagnose.result import DiagnoseReport, Verdict
from kvxfer.diagnose.run import diagnose_folder
from kvxfer.errors import InvalidUsage


def diagnosis(name: str, folder: Path) -> DiagnoseReport:
    return diagnose_folder(write_capture(name, folder / name))


def words_of(report: DiagnoseReport, check: str) -> str:
    (result,) = (one for one in report.checks if one.check == check)
    texts = [result.evidence]
    for one in result.findings:
        texts += [one.where, one.evidence, one.cause, one.remedy]
    return " | ".join(texts)


def assert_topology(facts: Facts, expected: dict[str, Any]) -> None:
    nics = {nic.name: nic for nic in facts.nics}
    for index, paths in expected.get("paths", {}).items():
        for other, path in paths.items():
            if other.startswith("GPU"):
                assert facts.pair(int(index), int(other[3:])).path == path, (index, other)
            else:
                assert nics[other].paths[int(index)] == path, (index, other)
    if "numa" in expected:
        assert [gpu.numa_node for gpu in facts.gpus or ()] == expected["numa"]


def test_there_are_enough_shapes(tmp_path: Path) -> None:
    seen = [name for name in CASES if name.startswith("seen_")]
    assert len(seen) >= 20
    assert all(expected_of(name)["source"].startswith("https://") for name in seen)
    own = {name for name in CASES if name.startswith("own_")}
    assert all("--capture" in expected_of(name)["source"] for name in own)
    assert all(expected_of(name)["source"] == "composed" for name in {*CASES} - {*seen} - own)
    paths = [write_capture(name, tmp_path / name) / "topo.txt" for name in CASES]
    assert len({path.read_text() for path in paths if path.exists()}) >= 8


@pytest.mark.parametrize("name", CASES)
def test_a_captured_node_is_judged_right(name: str, tmp_path: Path) -> None:
    report, expected = diagnosis(name, tmp_path), expected_of(name)
    found = {one.check: one.verdict.value for one in report.checks}
    assert {check: found[check] for check in expected["verdicts"]} == expected["verdicts"]
    faults = {check for check, verdict in found.items() if verdict in ("WARN", "FAIL")}
    assert faults <= expected["verdicts"].keys(), "a finding that nobody planted"
    for check, words in expected["mentions"].items():
        assert words in words_of(report, check)
    assert_topology(report.facts, expected)
    for result in report.checks:
        assert result.evidence or result.findings
        for one in result.findings:
            assert all((one.where, one.evidence, one.cause, one.remedy))
            assert "\n" not in one.remedy


def test_the_worst_comes_first(tmp_path: Path) -> None:
    report = diagnosis("nic_gpu_slow", tmp_path)
    ranks = [one.verdict.rank for one in report.checks]
    assert ranks == sorted(ranks, reverse=True)
    assert report.verdict is Verdict.WARN


@pytest.mark.parametrize("name", ["glued_columns", "ansi_codes", "hgx_h200"])
def test_spellings_of_one_matrix_are_one_matrix(name: str, tmp_path: Path) -> None:
    plain = diagnosis("hgx_h100", tmp_path).facts
    other = diagnosis(name, tmp_path).facts
    assert [pair.path for pair in other.pairs] == [pair.path for pair in plain.pairs]
    assert [nic.paths for nic in other.nics] == [nic.paths for nic in plain.nics]
    assert [gpu.numa_node for gpu in other.gpus or ()] == [0] * 4 + [1] * 4


def test_an_unknown_cell_is_an_unknown_path(tmp_path: Path) -> None:
    folder = write_capture("unknown_tokens", tmp_path)
    (folder / "sysfs.txt").unlink()  # which would tell it too
    facts = diagnose_folder(folder).facts
    assert [len(nic.paths) for nic in facts.nics] == [5] * 8
    assert all(pair.path == "NV18" for pair in facts.pairs)


def test_a_folder_without_a_capture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="holds no file of a capture"):
        diagnose_folder(tmp_path)
    with pytest.raises(InvalidUsage, match="is no folder"):
        diagnose_folder(tmp_path / "none")


@pytest.mark.parametrize("name", ["nvml.json", "acs.json"])
def test_a_damaged_capture_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"gpus": [{"index": "x"}]}')
    with pytest.raises(InvalidUsage, match=f"{name} of the capture cannot be read"):
        diagnose_folder(tmp_path)
