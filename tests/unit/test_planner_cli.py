"""kvxfer pd plan and kvxfer pd validate as commands."""

import json
from pathlib import Path
from typing import Any

import pytest
from full_disk import largest_file
from pd_runs import Bench, Engines

from kvxfer.cli.main import main
from kvxfer.cli.pd.plan_options import parse_concurrency
from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.figures import find_engine, shipped
from kvxfer.report import planner_page
from kvxfer.report.pd_cdf import Drawing, Panel, draw

SMALL = ("--model", "gpt-oss-120b", "--engine", "gpt-oss-120b-h100")
LOAD = ("--isl", "1k", "--osl", "64", "--concurrency", "2,4")


def plan(*words: str) -> int:
    return main(("pd", "plan", *SMALL, *words))


def record(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_engine_can_be_read_and_names_its_source(name: str) -> None:
    engine = find_engine(name)
    assert engine.steps
    assert engine.source
    sizes = [steps.tp_size for steps in engine.steps]
    assert sizes == sorted(set(sizes))
    slowest, fastest = engine.steps[0], engine.steps[-1]
    assert slowest.prefill_s(8192, 8192) >= fastest.prefill_s(8192, 8192)


def test_a_plan_recommends_and_keeps_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    words = (*LOAD, "--gpus", "2,4", "--slo", "ttft:5000,itl:p99:500", "--json", str(out))
    assert plan(*words) == 0
    found = record(out)
    assert found["schema"] == "kvxfer.pd.plan/1"
    assert found["recommendation"]["num_gpus"] == 2
    assert {one["num_gpus"] for one in found["candidates"]} == {2, 4}
    for one in found["candidates"]:
        assert [point["concurrency"] for point in one["points"]] == [2, 4]
        for point in one["points"]:
            assert point["ttft_ms"]["p50"] <= point["ttft_ms"]["p99"]
            free = any("no sweep was given" in text for text in point["extrapolated"])
            assert free == (one["kind"] == "pd")
    text = capsys.readouterr().out
    assert f"Take {found['recommendation']['name']} (2 GPUs): " in text
    assert "no sweep was given" in text


def test_objectives_that_nothing_meets_are_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*LOAD, "--gpus", "2", "--slo", "ttft:1") == 1
    text = capsys.readouterr().out
    assert "Nothing meets the objectives; closest: agg-1xtp2 (2 GPUs): with 1024 in" in text
    assert "Take" not in text


def test_without_objectives_nothing_is_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*LOAD, "--gpus", "2") == 0
    assert "Nothing is recommended" in capsys.readouterr().out


def test_measured_transfers_take_their_time(tmp_path: Path) -> None:
    sweep = Path(__file__).parents[2] / "bench" / "results" / "2026-11-29-h200x2-models.json"
    gaps_ms = []
    for more in ((), ("--sweep", str(sweep), "--transport", "nvlink", "--control-ms", "200")):
        out = tmp_path / "plan.json"
        words = (*LOAD, "--gpus", "4", "--tp", "2", "--kinds", "pd", "--json", str(out))
        assert plan(*words, "--first-token-from", "prefill", *more) == 0
        point = record(out)["candidates"][0]["points"][0]
        gaps_ms.append(point["first_gap_ms"]["p50"])
    assert gaps_ms[1] > gaps_ms[0] + 150.0


def test_rows_of_one_memory_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Path(__file__).parents[2] / "bench" / "results" / "2026-11-29-cpu-2-cores-models.json"
    words = (*LOAD, "--gpus", "4", "--tp", "2", "--kinds", "pd", "--sweep", str(sweep))
    assert plan(*words) == 2
    assert "rows of private, shared memory; name one (--memory)" in capsys.readouterr().err
    gaps_ms = []
    for memory in ("shared", "private"):
        out = tmp_path / "plan.json"
        named = ("--first-token-from", "prefill", "--memory", memory, "--json", str(out))
        assert plan(*words, *named) == 0
        gaps_ms.append(record(out)["candidates"][0]["points"][0]["first_gap_ms"]["p50"])
    assert gaps_ms[0] != gaps_ms[1]


def test_the_share_asked_for_is_taken_as_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    words = ("--gpus", "2", "--slo", "ttft:5000", "--attained", "99.9", "--json", str(out))
    assert plan(*LOAD, *words) == 0
    assert record(out)["attained"] == 0.999
    assert "wanted for 99.9% of them" in capsys.readouterr().out


def test_a_full_disk_takes_neither_the_table_nor_the_old_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--json", "--html", "--png"):
        old = tmp_path / f"old{option}"
        old.write_text("old")
        with largest_file(1000):
            assert plan(*LOAD, "--gpus", "2", option, str(old)) == 2
        out, err = capsys.readouterr()
        assert "agg-1xtp2" in out
        assert "File too large" in err
        assert old.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 3


def test_the_page_stands_alone(tmp_path: Path) -> None:
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    words = ("--gpus", "2", "--slo", "ttft:5000", "--html", str(page), "--png", str(picture))
    assert plan(*LOAD[:4], "--concurrency", "2", *words) == 0
    text = page.read_text()
    assert text.count("<svg") == 1
    assert "Take agg-1xtp2 (2 GPUs)" in text
    assert "http" not in text.replace("http-equiv", "")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_drawing_counts_gpus_as_people_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []

    def noting(title: str, panels: list[Panel], *, key: bool) -> Drawing:
        labels.extend(line.label for line in panels[0].lines)
        return draw(title, panels, key=key)

    monkeypatch.setattr(planner_page, "draw", noting)
    words = ("--engine", "gpt-oss-120b-h200", "--gpus", "1,2", "--kinds", "aggregated", "--tp", "1")
    load = ("--isl", "64", "--osl", "4", "--concurrency", "1")
    assert plan(*words, *load, "--png", str(tmp_path / "plan.png")) == 0
    assert labels == ["agg-2xtp1 (2 GPUs)", "agg-1xtp1 (1 GPU)"]


def test_a_trace_and_strategies_are_compared(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 600, "output_length": 8, "hash_ids": [%d, %d]}\n'
    trace.write_text("".join(line % (100 * at, at % 3, 100 + at) for at in range(30)))
    out = tmp_path / "plan.json"
    words = ("--traces", str(trace), "--gpus", "2", "--kinds", "aggregated", "--json", str(out))
    assert plan(*words, "--trace-format", "mooncake", "--strategies", "chunked,prefix-cache") == 0
    found = {one["name"]: one["points"][0] for one in record(out)["candidates"]}
    assert set(found) == {"agg-1xtp2/chunked", "agg-1xtp2/prefix-cache"}
    assert (
        found["agg-1xtp2/prefix-cache"]["ttft_ms"]["p50"]
        < found["agg-1xtp2/chunked"]["ttft_ms"]["p50"]
    )
    assert found["agg-1xtp2/chunked"]["concurrency"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --isl and --osl, or --traces"),
        ((*LOAD, "--traces", "x"), "--isl does not go with --traces"),
        (("--traces", "x", "--concurrency", "4"), "--concurrency does not go with --traces"),
        ((*LOAD, "--speed", "abc"), "--speed goes with --traces"),
        ((*LOAD, "--most-requests", "x"), "--most-requests goes with --traces"),
        ((*LOAD, "--trace-format", "vllm"), "--trace-format goes with --traces"),
        ((*LOAD, "--strict"), "--strict goes with --sweep"),
        ((*LOAD, "--transport", "bogus"), "--transport goes with --sweep"),
        ((*LOAD, "--control-ms", "-9"), "--control-ms goes with --sweep"),
        ((*LOAD, "--contention", "/nonexistent"), "--contention goes with --sweep"),
        (("--isl", "131072", "--osl", "1"), "131073 tokens (131072 in, 1 out), and gpt-oss-120b"),
        ((*LOAD, "--engine", "gpt-9"), "these are gpt-oss-120b-h100"),
        ((*LOAD, "--attained", "101"), "--attained"),
        ((*LOAD, "--kinds", "both"), "--kinds"),
        ((*LOAD, "--slo", "speed:9"), "--slo"),
        ((*LOAD, "--gpus", "2", "--tp", "1"), "no figures for TP 1"),
        ((*LOAD, "--sweep", "/nonexistent"), "cannot read /nonexistent"),
    ],
)
def test_wrong_usage_is_status_2(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*words) == 2
    assert message in capsys.readouterr().err


def test_ranges_of_concurrency_hold_powers_of_two() -> None:
    assert parse_concurrency("1..32") == [1, 2, 4, 8, 16, 32]
    assert parse_concurrency("3..20,64") == [3, 4, 8, 16, 20, 64]
    with pytest.raises(InvalidUsage, match="goes down"):
        parse_concurrency("8..2")
    with pytest.raises(InvalidUsage, match="whole number"):
        parse_concurrency("0")


def test_a_run_is_validated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(tmp_path / "run")
    bench.all("prefill", Engines(kind="prefill_only"), [1, 4], osl=1, num_prompts=16)
    bench.all("kvx", Engines(kind="pd"), [1, 4], num_prompts=16)
    out = tmp_path / "validation.json"
    fitted = "prefill/c1-i8192-o1,prefill/c4-i8192-o1,kvx/c1-i8192-o128"
    words = ("pd", "validate", str(tmp_path / "run"), "--model", "llama-3.1-8b")
    assert main((*words, "--fit", fitted, "--json", str(out))) == 0
    found = record(out)
    assert {point["load"] for point in found["points"] if not point["fitted"]} == {"c4-i8192-o128"}
    assert "TTFT P50" in capsys.readouterr().out
    assert main(words) == 2
    assert "give --engine, or --fit" in capsys.readouterr().err
    assert main((*words, "--fit", f"{fitted},TYPO/c9")) == 2
    assert "no such point: TYPO/c9; the run has" in capsys.readouterr().err
