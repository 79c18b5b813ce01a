"""Commands of the planner on models that are not one, and on records of several set-ups."""

from pathlib import Path

import pytest
from full_disk import largest_file
from pd_runs import Bench, Engines

from kvxfer.cli.main import main
from kvxfer.pd.planner.engine_model import load_engine

LOAD = ("--isl", "1k", "--osl", "64", "--concurrency", "2", "--gpus", "2")


def run_of(
    folder: Path, model: str, *names: str, step_s: tuple[float, ...] = (5e-3,), **fields: int
) -> Path:
    bench = Bench(folder)
    prefill = Engines(kind="prefill_only", jitter=0.01)
    bench.setup("prefill", prefill, model=model, **fields)
    for concurrency in (1, 4):
        bench.point("prefill", prefill, concurrency, osl=1, num_prompts=16)
    for name, one_s in zip(names, step_s, strict=True):
        engines = Engines(kind="pd", jitter=0.01, step_s=one_s)
        bench.setup(name, engines, model=model, **fields)
        bench.point(name, engines, 4, num_prompts=16)
    return folder


def profile(folder: Path, out: Path, model: str, *words: str) -> int:
    return main(
        ("pd", "profile", "--records", str(folder), "--model", model, "--out", str(out), *words)
    )


def test_a_plan_of_one_model_s_steps_and_another_s_kv_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("pd", "plan", *LOAD, "--model", "llama-3.1-8b", "--engine", "gpt-oss-120b-h100")
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "gpt-oss-120b (36 layers" in said
    assert "llama-3.1-8b (32 layers" in said
    assert "give --model gpt-oss-120b, or --engine" in said


def test_records_of_another_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", "tiny", "kvx")
    out = tmp_path / "engine.json"
    assert profile(run, out, "llama-3.1-8b") == 2
    said = capsys.readouterr().err
    assert "the records are of tiny (4 layers" in said
    assert "or --model of tiny" in said
    assert not out.exists()
    words = ("pd", "validate", str(run), "--model", "llama-3.1-8b")
    assert main((*words, "--engine", "llama-3.1-8b-h200")) == 2
    assert "the records are of tiny (4 layers" in capsys.readouterr().err


def test_records_say_the_size_of_their_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", "tiny", "kvx", prefill_tp=2, decode_tp=2)
    out = tmp_path / "engine.json"
    assert profile(run, out, "tiny", "--tp", "4") == 2
    assert "--tp is 4, and the records are of TP 2" in capsys.readouterr().err
    assert not out.exists()
    for words in ((), ("--tp", "2")):
        assert profile(run, out, "tiny", *words) == 0
        assert [one.tp_size for one in load_engine(out).steps] == [2]


def test_a_dtype_that_is_none_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "engine.json"
    assert profile(tmp_path / "none", out, "tiny", "--kv-dtype", "zork") == 2
    assert "dtype is 'zork'" in capsys.readouterr().err
    run = run_of(tmp_path / "run", "tiny", "kvx")
    assert profile(run, out, "tiny", "--kv-dtype", "bf16") == 0
    assert load_engine(out).kv_dtype == "bfloat16"


def test_a_full_disk_takes_neither_the_fit_nor_the_old_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", "tiny", "kvx")
    out = tmp_path / "engine.json"
    assert profile(run, out, "tiny") == 0
    before = out.read_bytes()
    capsys.readouterr()
    with largest_file(100):
        assert profile(run, out, "tiny", "--add") == 2
    said, err = capsys.readouterr()
    assert "measured, ms" in said
    assert "File too large" in err
    assert out.read_bytes() == before


def test_figures_of_another_model_are_not_added_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "engine.json"
    assert profile(run_of(tmp_path / "one", "tiny", "kvx"), out, "tiny") == 0
    other = run_of(tmp_path / "other", "llama-3.1-8b", "kvx")
    assert profile(other, out, "llama-3.1-8b", "--add") == 2
    assert "holds figures of tiny (4 layers" in capsys.readouterr().err
    assert load_engine(out).model == "tiny"
    words = ("pd", "plan", *LOAD, "--model", "llama-3.1-8b", "--engine", str(out))
    assert main(words) == 2
    assert "give --model with tiny's config.json" in capsys.readouterr().err


def test_names_that_are_not_known_are_told_and_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path / "run", "dummy:llama-3.1-8b", "kvx")
    out = tmp_path / "engine.json"
    assert profile(run, out, "llama-3.1-8b") == 0
    assert not caplog.messages
    assert profile(run, out, "mine/Llama-3.1-8B-Instruct") == 0
    assert load_engine(out).model == "mine/Llama-3.1-8B-Instruct"
    assert "records are of dummy:llama-3.1-8b" in caplog.text
    assert main(("pd", "validate", str(run), "--model", "llama-3.1-8b", "--engine", str(out))) == 0
    assert "are of mine/Llama-3.1-8B-Instruct, KV of llama-3.1-8b" in caplog.text


def test_set_ups_that_differ_are_told_apart_and_make_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", "llama-3.1-8b", "fast", "slow", step_s=(5e-3, 25e-3))
    out = tmp_path / "engine.json"
    assert profile(run, out, "llama-3.1-8b") == 1
    text = capsys.readouterr().out
    assert "fast: 4 decoding, 8256 tokens of context each" in text
    assert "slow: 4 decoding, 8256 tokens of context each" in text
    assert "the decode steps are of 2 set-ups (fast, slow)" in text
    assert "fitted more than 30% off" in text
    assert "--points" in text
    assert f"wrote {out}" in text
    assert out.exists()
    points = "prefill/c1-i8192-o1,prefill/c4-i8192-o1,fast/c4-i8192-o128"
    assert profile(run, out, "llama-3.1-8b", "--points", points) == 0
    assert "2 set-ups" not in capsys.readouterr().out


def test_what_was_not_measured_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", "llama-3.1-8b", "kvx")
    assert profile(run, tmp_path / "engine.json", "llama-3.1-8b") == 0
    lines = capsys.readouterr().out.splitlines()
    for start in ("prompt of 1 token ", "1 decoding, 0 tokens of context"):
        (line,) = (one for one in lines if one.strip().startswith(start))
        assert "assumed" in line
        assert "%" not in line
    assert any(line.startswith("assumed: not measured") for line in lines)


def test_points_whose_messages_came_together_have_no_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", "llama-3.1-8b", "kvx")

    def join(result: dict[str, list[list[float]]]) -> None:
        for gaps_s in result["itls"]:
            gaps_s[3::2] = [1e-5] * len(gaps_s[3::2])

    Bench(run).point("kvx", Engines(kind="pd"), 2, num_prompts=16, spoil=join)
    assert profile(run, tmp_path / "engine.json", "llama-3.1-8b") == 0
    assert "kvx/c2-i8192-o128: 50% of the gaps are under 0.1 ms" in capsys.readouterr().out
    assert profile(run, tmp_path / "e.json", "llama-3.1-8b", "--points", "kvx/c2-i8192-o128") == 2
    assert "measure on an idle machine" in capsys.readouterr().err


def test_a_plan_on_a_bad_fit_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", "llama-3.1-8b", "fast", "slow", step_s=(5e-3, 25e-3))
    out = tmp_path / "engine.json"
    profile(run, out, "llama-3.1-8b")
    capsys.readouterr()
    words = ("pd", "plan", *LOAD, "--model", "llama-3.1-8b", "--engine", str(out))
    assert main(words) == 0
    assert "off its own measurements" in capsys.readouterr().out
    assert main((*words[:-1], "llama-3.1-8b-h200")) == 0
    assert "off its own measurements" not in capsys.readouterr().out
