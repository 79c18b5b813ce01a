"""kvxfer pd profile on an engine behind HTTP, in real time.

A busy machine makes steps longer, never shorter: only lower bounds are asked of the figures, and
status 1 (written, but a step is fitted far off) is as good as 0.
"""

from pathlib import Path

import pytest
from planner_engines import KnownEngine, served

from kvxfer.cli.main import main
from kvxfer.pd.planner.engine_model import load_engine

ASKED = ("--prompts", "64,512", "--batches", "1,4", "--contexts", "64,512", "--seconds", "60")


def test_a_running_engine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "engine.json"
    known = KnownEngine(decode_s=8e-3, prefill_base_s=8e-3, token_s=4e-5, context_s=2e-6)
    with served(known) as url:
        words = ("pd", "profile", "--url", url, "--model", "known", "--out", str(out), *ASKED)
        assert main(words) in (0, 1)
    engine = load_engine(out)
    steps = engine.at_tp(1)
    assert steps.kv_capacity_tokens == 16_000
    assert steps.measured.num_decoding == 4
    assert steps.prefill_s(512, 8192) + steps.request_s >= 512 * known.token_s + known.request_s
    assert steps.step_s(num_decoding=4, num_context_tokens=4 * 512) >= 8e-3
    table = capsys.readouterr().out
    assert "prompt of 512 tokens" in table
    assert "4 decoding" in table


def test_figures_of_another_tp_size_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    few = ("--prompts", "64", "--batches", "1", "--contexts", "64", "--seconds", "60")
    with served(KnownEngine()) as url:
        words = ("pd", "profile", "--url", url, "--model", "known", "--out", str(out), *few)
        assert main((*words, "--tp", "4")) in (0, 1)
        assert main((*words, "--tp", "2", "--add")) in (0, 1)
    assert [steps.tp_size for steps in load_engine(out).steps] == [2, 4]


def test_a_time_too_short_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "engine.json"
    with served(KnownEngine(decode_s=0.5)) as url:
        words = ("pd", "profile", "--url", url, "--model", "known", "--out", str(out))
        assert main((*words, "--seconds", "1")) == 3
    assert not out.exists()
    assert "more time" in capsys.readouterr().err


def test_a_model_that_is_not_served_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(KnownEngine()) as url:
        words = ("pd", "profile", "--url", url, "--model", "x", "--out", str(tmp_path / "e.json"))
        assert main(words) == 2
    assert "it serves known" in capsys.readouterr().err


def test_an_engine_that_dies_amid_it_is_no_end_of_time(tmp_path: Path) -> None:
    with served(KnownEngine(), dies_after=6) as url:
        words = ("pd", "profile", "--url", url, "--model", "known", "--seconds", "60")
        assert main((*words, "--out", str(tmp_path / "engine.json"))) in (1, 3)
    assert not (tmp_path / "engine.json").exists()
