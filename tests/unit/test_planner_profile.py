"""The costs of an engine out of what its clients see, of engines whose costs are known."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pd_runs import Bench, Engines, Result
from planner_engines import KnownEngine, VirtualAsk

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.profile_live import ProfilePlan, profile, with_jitter
from kvxfer.pd.planner.profile_records import engine_of, profile_of, read_points
from kvxfer.pd.planner.profile_streams import TimeUp

PLAN = ProfilePlan(prompts=(128, 512, 2048), batches=(1, 2, 4, 8), contexts=(128, 2048))


def test_the_costs_of_a_known_engine_are_found() -> None:
    known = KnownEngine()
    steps = profile(VirtualAsk(known), PLAN).fit(1)
    assert steps.request_s == pytest.approx(known.request_s, rel=0.02)
    assert steps.context_s == pytest.approx(known.context_s, rel=0.02)
    assert steps.token_s == pytest.approx(known.token_s, rel=0.03)
    assert steps.prefill_base_s == pytest.approx(known.prefill_base_s, rel=0.1)
    for batch in (1, 2, 4, 8):
        assert steps.decode_s(batch) == pytest.approx(
            known.decode_s + known.sequence_s * batch, rel=0.01
        )
    assert steps.residual is not None
    assert steps.residual.worst < 0.01


@pytest.mark.parametrize("field", ["decode_s", "context_s", "token_s", "request_s"])
def test_another_engine_gives_other_costs(field: str) -> None:
    known = KnownEngine()
    setattr(known, field, 2 * getattr(known, field))
    steps = profile(VirtualAsk(known), PLAN).fit(1)
    found = {
        "decode_s": steps.decode_s(1) - known.sequence_s,
        "context_s": steps.context_s,
        "token_s": steps.token_s,
        "request_s": steps.request_s,
    }
    assert found[field] == pytest.approx(getattr(known, field), rel=0.05)


@pytest.mark.parametrize("together", [False, True])
def test_tokens_that_come_together_are_seen(together: bool) -> None:
    found = profile(VirtualAsk(KnownEngine(), together=together), PLAN)
    assert found.first_tokens_together == together


def test_a_time_that_runs_out_keeps_what_was_measured() -> None:
    whole = VirtualAsk(KnownEngine())
    profile(whole, PLAN)
    found = profile(VirtualAsk(KnownEngine(), seconds=whole.now_s / 2), PLAN)
    assert found.cut_off
    assert found.fit(1).measured.num_decoding < 8


def test_a_time_too_short_for_anything_says_so() -> None:
    with pytest.raises(TimeUp, match="time is up"):
        profile(VirtualAsk(KnownEngine(), seconds=1e-3), PLAN)


def test_what_the_engine_cannot_take_is_not_asked() -> None:
    ask = VirtualAsk(KnownEngine())
    profile(ask, ProfilePlan(batches=(1, 2), contexts=(128, 2048), longest=600))
    assert max(isl + osl for _, isl, osl in ask.asked) <= 600
    with pytest.raises(InvalidUsage, match="no prompt fits"):
        profile(ask, ProfilePlan(longest=100))
    with pytest.raises(InvalidUsage, match="shorter --contexts"):
        profile(ask, ProfilePlan(prompts=(128,), contexts=(2048,), longest=200))


def test_jitter_has_the_spread_of_the_gaps_and_the_mean_one() -> None:
    found = profile(VirtualAsk(KnownEngine()), PLAN)
    spread = np.linspace(0.5, 1.5, 1001)
    gaps = [(row, (row.step_s * spread).tolist()) for row, _ in found.gaps]
    steps = with_jitter(found.fit(1), gaps)
    assert np.mean(steps.jitter) == pytest.approx(1.0)
    assert steps.jitter[0] == pytest.approx(0.505, abs=0.01)
    assert steps.jitter[-1] == pytest.approx(1.495, abs=0.01)


def test_steps_of_one_sequence_have_a_spread_of_their_own() -> None:
    found = profile(VirtualAsk(KnownEngine()), PLAN)
    gaps = [(row, [row.step_s, row.step_s * row.num_decoding]) for row, _ in found.gaps]
    steps = with_jitter(found.fit(1), gaps)
    assert set(steps.jitter_alone) == {1.0}
    assert max(steps.jitter) > 1.2
    alone = with_jitter(found.fit(1), [one for one in gaps if one[0].num_decoding == 1])
    assert alone.jitter == alone.jitter_alone == steps.jitter_alone


def _run(folder: Path, step_s: float = 5e-3) -> Path:
    bench = Bench(folder)
    bench.all(
        "prefill",
        Engines(kind="prefill_only", jitter=0.01, step_s=step_s),
        [1, 4],
        osl=1,
        num_prompts=16,
    )
    bench.all("kvx", Engines(kind="pd", jitter=0.01, step_s=step_s), [1, 4], num_prompts=16)
    return folder


def test_records_give_the_costs_that_they_were_made_with(tmp_path: Path) -> None:
    engine = engine_of(read_points(_run(tmp_path)), source="a test")
    steps = engine.at_tp(1)
    assert engine.model == "llama-3.1-8b"
    assert steps.prefill_s(8192, 8192) == pytest.approx(8192 * 15e-6, rel=0.02)
    for batch in (1, 2):
        assert steps.step_s(num_decoding=batch, num_context_tokens=batch * 8256) == pytest.approx(
            5e-3, rel=0.02
        )


def test_records_of_one_length_blame_context_not_sequences(tmp_path: Path) -> None:
    found = profile_of(read_points(_run(tmp_path)))
    steps = found.fit(1)
    assert steps.pair_s == 0.0
    assert steps.prefill_base_s < 0.1 * steps.prefill_s(8192, 8192)


def test_only_the_named_points_are_taken(tmp_path: Path) -> None:
    points = read_points(_run(tmp_path))
    some = profile_of(points, {"prefill/c1-i8192-o1", "kvx/c1-i8192-o128"})
    assert some.fit(1).measured.num_decoding == 1
    with pytest.raises(InvalidUsage, match="no such point: kvx/c2-i8192-o128; the run has"):
        profile_of(points, {"kvx/c2-i8192-o128"})


def test_a_queue_that_is_not_always_full_tells_no_step_of_a_prefill(tmp_path: Path) -> None:
    bench = Bench(_run(tmp_path))
    prefill = Engines(kind="prefill_only", jitter=0.01)
    known = profile_of(read_points(tmp_path)).fit(1)

    def seldom(result: Result) -> None:  # one at a time, each a while after the last
        result["start_times"] = [1672.0 + 2.0 * at for at in range(16)]

    load = {"isl": 8192, "osl": 1, "num_prompts": 16, "spoil": seldom}
    bench.point("prefill", prefill, 4, request_rate=0.5, **load)
    bench.point("prefill", prefill, 4, request_rate=0.5, trace="mine", **load)
    found = profile_of(read_points(tmp_path))
    assert found.fit(1) == known
    for label in ("prefill/c4-i8192-o1-r0.5", "prefill/c4-i8192-o1-r0.5-tmine"):
        assert any(text.startswith(f"{label}: sent at a rate") for text in found.warnings)
    only = {"prefill/c4-i8192-o1-r0.5", "kvx/c1-i8192-o128"}
    with pytest.raises(InvalidUsage, match=r"sent at a rate.*without --request-rate"):
        profile_of(read_points(tmp_path), only)


def test_a_single_reply_is_of_no_queue(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.all("prefill", Engines(kind="prefill_only", jitter=0.0), [4], osl=1, num_prompts=1)
    bench.all("kvx", Engines(kind="pd"), [4], num_prompts=16)
    steps = engine_of(read_points(tmp_path), source="a test").at_tp(1)
    assert steps.prefill_s(8192, 8192) == pytest.approx(8192 * 15e-6, rel=0.05)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda result: result.pop("start_times"), "has no start times"),
        (lambda result: result["errors"].__setitem__(3, "x"), "has 1 failed of 16 requests"),
        (
            lambda result: result.update(
                {name: [] for name, value in result.items() if isinstance(value, list)}
            ),
            "has no request",
        ),
    ],
)
def test_points_that_tell_nothing_are_left_out_and_said(
    spoil: Callable[[Result], None],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Bench(_run(tmp_path)).point("kvx", Engines(kind="pd"), 2, num_prompts=16, spoil=spoil)
    assert "kvx/c2-i8192-o128" not in {one.label for one in read_points(tmp_path)}
    assert f"kvx/c2-i8192-o128 {reason}, so it is left out" in caplog.text


def test_engines_that_differ_do_not_make_one(tmp_path: Path) -> None:
    bench = Bench(_run(tmp_path))
    bench.setup("other", Engines(kind="pd"), model="qwen3-32b")
    bench.point("other", Engines(kind="pd"), 1, num_prompts=4)
    with pytest.raises(InvalidUsage, match="models or TP sizes"):
        profile_of(read_points(tmp_path))
