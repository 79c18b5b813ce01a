"""The experiment on reuse: prompts, parts of a TTFT, set-ups asked, which figures are shown."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_reuse import TOKEN_BYTES, FakeReuse, reuse_setup, serving

from kvxfer.connectors.vllm.timings import Event
from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable, PeerLost, TransferTimeout
from kvxfer.pd.experiments.kv_reuse import measure
from kvxfer.pd.experiments.kv_reuse.cases import Sweep, sweep_of
from kvxfer.pd.experiments.kv_reuse.measure import Asker
from kvxfer.pd.experiments.kv_reuse.parts import FIELDS, Parts, parts_of
from kvxfer.pd.experiments.kv_reuse.points import points_of
from kvxfer.pd.experiments.kv_reuse.record import ReuseRun
from kvxfer.pd.experiments.options import SIZES
from kvxfer.pd.experiments.registry import find_experiment
from kvxfer.pd.result import Reuse

ISL, HITS = 1024, (0, 512, 1024)
SWEEP = Sweep(isl=ISL, osl=4, hits=HITS, count=2)


# The prompts.


def test_prompts_begin_apart_and_are_the_same_each_time() -> None:
    cases = [*SWEEP.cases(), *SWEEP.warm_up()]
    assert [case.hit_tokens for case in cases] == list(HITS) * 3
    assert len({case.prompt[:16] for case in cases}) == len(cases)
    assert [case.prompt for case in SWEEP.cases()] == [case.prompt for case in SWEEP.cases()]
    assert {len(case.prompt) for case in cases} == {ISL}
    assert cases[1].prefix == cases[1].prompt[:512]
    assert not any(a.name in b.name for a in cases for b in cases if a is not b)


@pytest.mark.parametrize(
    "changes",
    [
        *({"isl": 1000}, {"hits": ()}, {"hits": (512, 0)}, {"hits": (100,)}, {"hits": (2048,)}),
        *({"count": 0}, {"hits": (512, 512)}),
    ],
)
def test_a_sweep_without_a_meaning_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsage):
        replace(SWEEP, **changes)


@pytest.mark.parametrize("size", SIZES)
def test_every_size_describes_a_sweep(size: Any) -> None:
    sweep = sweep_of(find_experiment("kv-reuse").sizes[size])
    assert (sweep.hits[0], sweep.hits[-1]) == (0, sweep.isl)


# Parts of one request.

SENT_S, TTFT_S = 10.0, 0.100
TIMES = {
    "arrived": 10.004,
    "asked": 10.005,
    "answered": 10.007,
    "placed": 10.008,
    "begun": 10.010,
    "loaded": 10.040,
    "scheduled": 10.043,
}


def events(*without: str, **times: float) -> list[Event]:
    found = {**TIMES, **times}
    return [
        Event(what=what, at_s=at_s, request="r", num_tokens=512 * (what == "answered"))  # type: ignore[arg-type]
        for what, at_s in found.items()
        if what not in without
    ]


def ms(parts: Parts | str) -> list[float]:
    assert isinstance(parts, Parts), parts
    return [round(getattr(parts, field) * 1e3, 6) for field in FIELDS]


def test_parts_of_a_load_between_steps_sum_to_ttft() -> None:
    parts = parts_of(events(), SENT_S, TTFT_S)
    assert ms(parts) == [4.0, 2.0, 3.0, 30.0, 4.0, 57.0]
    assert sum(ms(parts)) == pytest.approx(TTFT_S * 1e3)
    assert isinstance(parts, Parts)
    assert parts.loading_s == pytest.approx(0.039)


def test_the_last_worker_ends_a_load_and_the_first_begins_it() -> None:
    more = [Event(what="begun", at_s=10.012), Event(what="loaded", at_s=10.041)]
    assert ms(parts_of([*events(), *more], SENT_S, TTFT_S)) == [4.0, 2.0, 3.0, 31.0, 3.0, 57.0]


def test_a_load_inside_the_step_waits_for_layers() -> None:
    inside = events(scheduled=10.009)
    waited = Event(what="waited", at_s=10.06, seconds=0.005)
    assert ms(parts_of([*inside, waited], SENT_S, TTFT_S)) == [4.0, 2.0, 3.0, 35.0, 1.0, 55.0]


def test_without_a_hit_there_is_nothing_to_load() -> None:
    plain = [
        Event(what=what, at_s=TIMES[what])  # type: ignore[arg-type]
        for what in ("arrived", "asked", "answered", "scheduled")
    ]
    assert ms(parts_of(plain, SENT_S, TTFT_S)) == [4.0, 2.0, 0.0, 0.0, 37.0, 57.0]


@pytest.mark.parametrize("without", ["arrived", "answered", "begun", "loaded", "scheduled"])
def test_what_nobody_noted_is_named(without: str) -> None:
    found = parts_of(events(without), SENT_S, TTFT_S)
    # Without the answer nobody knows of a hit.
    assert isinstance(found, str)
    assert without in found


@pytest.mark.parametrize(
    "times", [{"arrived": 9.9}, {"asked": 10.02}, {"begun": 10.05}, {"scheduled": 10.2}]
)
def test_parts_that_would_not_sum_to_ttft_are_said_so(times: dict[str, float]) -> None:
    assert "not sum to TTFT" in str(parts_of(events(**times), SENT_S, TTFT_S))


def test_a_wait_longer_than_the_step_is_said_so() -> None:
    waited = Event(what="waited", at_s=10.06, seconds=0.5)
    assert "not sum to TTFT" in str(parts_of([*events(), waited], SENT_S, TTFT_S))


# One set-up that runs.


def ask(
    folder: Path, reuse: Reuse, *faults: str, sweep: Sweep = SWEEP, model: str = "tiny"
) -> ReuseRun:
    is_far = reuse == "lmcache-far"
    fake = FakeReuse(folder, *faults, has_store=is_far or reuse == "mooncake", is_far=is_far)
    with serving(fake):
        return Asker(stack=fake.stack, setup=reuse_setup(reuse, model), timeout_s=10.0).run(sweep)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_LOOK_S", 0.001)
    for name in ("_STORE_S", "_DROP_S", "_COUNT_S"):
        monkeypatch.setattr(measure, name, 1.0)


def test_hits_come_from_the_store_alone_and_have_parts(tmp_path: Path) -> None:
    run = ask(tmp_path, "mooncake")
    assert [(one.hit_tokens, one.cached_tokens) for one in run.asked] == [
        (hit, 0) for hit in HITS * 2
    ]
    assert [one.loaded_tokens for one in run.asked] == [0, 512, 1023] * 2
    assert run.token_bytes == TOKEN_BYTES
    for one in run.asked:
        assert one.parts is not None, one.no_parts
        assert (one.parts.transfer_s > 0.001) == (one.hit_tokens > 0)
        assert sum(getattr(one.parts, field) for field in FIELDS) == pytest.approx(one.ttft_s)


def test_an_engine_alone_has_hits_of_its_own_and_no_parts(tmp_path: Path) -> None:
    run = ask(tmp_path, "vllm")
    assert [one.cached_tokens for one in run.asked] == [0, 512, 1023] * 2
    assert {(one.parts, one.no_parts, one.loaded_tokens) for one in run.asked} == {(None, "", 0)}


def test_without_notes_figures_stay_and_parts_are_missing(tmp_path: Path) -> None:
    run = ask(tmp_path, "mooncake", "notes nothing")
    assert all(one.parts is None and "arrived" in one.no_parts for one in run.asked)
    points, faults, notes = points_of([run], "measured")
    assert (len(points), faults) == (3, [])
    assert any("have no parts: nobody noted arrived" in note for note in notes)


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("holds nothing", TransferTimeout, "mooncake is not done with a new prompt .* not take it"),
        ("never ends", TransferTimeout, "mooncake is not done with a new prompt"),
        ("keeps", TransferTimeout, "does not give up its prefix cache"),
        ("mute", NotAvailable, "does not say how much mooncake holds"),
        ("counts nothing", NotAvailable, "counted no prompt"),
    ],
)
def test_a_set_up_that_cannot_be_measured_says_why(
    fault: str, error: type[KvxferError], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text):
        ask(tmp_path, "mooncake", fault)


@pytest.mark.parametrize(
    ("text", "done"),
    [
        *(("", True), ("null", True), ("<html>", True), ('{"success":true}', True), ("{}", True)),
        ('{"success":false}', False),
    ],
)
def test_old_engines_say_nothing_when_they_drop(text: str, done: bool) -> None:
    assert measure._says_done(text) == done


# Which figures are shown.


def shown(*runs: ReuseRun) -> tuple[list[tuple[str, int]], list[str], list[str]]:
    points, faults, notes = points_of(runs, "measured")
    return [(point.name, point.hit_tokens) for point in points], faults, notes


def test_hits_that_did_not_come_are_a_fault_and_no_figure(tmp_path: Path) -> None:
    points, faults, _ = shown(ask(tmp_path, "mooncake", "forgets"))
    assert points == [("mooncake", 0)]
    assert len(faults) == 2
    assert "512 tokens there: 2 of 2 prompts had other hits, such as 0 tokens" in faults[0]


def test_hits_of_the_engines_own_cache_are_a_fault(tmp_path: Path) -> None:
    run = ask(tmp_path, "mooncake")
    first = msgspec.structs.replace(run.asked[1], cached_tokens=16, loaded_tokens=496)
    spoilt = msgspec.structs.replace(run, asked=[first, *run.asked])
    assert any("16 tokens in the engine's own" in fault for fault in shown(spoilt)[1])


@pytest.mark.parametrize(
    ("reuse", "field", "is_shown"), [("mooncake", "loaded", True), ("vllm", "cached", False)]
)
def test_a_store_may_load_all_of_a_prompt_and_the_engines_own_cache_not(
    reuse: Reuse, field: str, is_shown: bool, tmp_path: Path
) -> None:
    run = ask(tmp_path, reuse)
    whole = [
        msgspec.structs.replace(one, **{f"{field}_tokens": one.hit_tokens}) for one in run.asked
    ]
    points, faults, _ = shown(msgspec.structs.replace(run, asked=whole))
    assert ((reuse, ISL) in points) == is_shown
    assert bool(faults) != is_shown


def test_hits_of_a_far_store_are_read_from_there(tmp_path: Path) -> None:
    run = ask(tmp_path, "lmcache-far")
    assert [(one.far_chunks, one.near_chunks) for one in run.asked] == [(0, 0), (2, 0), (4, 0)] * 2
    assert shown(run)[:2] == ([("lmcache-far", hit) for hit in HITS], [])


@pytest.mark.parametrize(
    ("fault", "text"), [("nearer", "0 chunks read from there and 2 not"), ("nowhere", "and 0 not")]
)
def test_hits_that_are_not_from_the_far_store_are_a_fault(
    fault: str, text: str, tmp_path: Path
) -> None:
    points, faults, _ = shown(ask(tmp_path, "lmcache-far", fault))
    assert points == [("lmcache-far", 0)]
    assert len(faults) == 2
    assert "2 of 2 prompts had hits that are not from the far store" in faults[0]
    assert text in faults[0]


def test_a_store_that_ends_before_it_took_a_prompt_is_told_of(tmp_path: Path) -> None:
    sweep = Sweep(isl=ISL, osl=4, hits=(512,), count=1)
    with pytest.raises(PeerLost, match="far-store ended"):
        ask(tmp_path, "lmcache-far", "holds nothing", "ends", sweep=sweep)


def test_answers_that_differ_after_a_hit_are_a_fault(tmp_path: Path) -> None:
    points, faults, notes = shown(ask(tmp_path, "none"), ask(tmp_path, "mooncake", "wrong"))
    assert points == [("none", hit) for hit in HITS] + [("mooncake", 0)]
    assert "2 of 2 answers are not those without reuse" in faults[0]
    assert notes == []


def test_invented_weights_say_nothing_and_that_is_said(tmp_path: Path) -> None:
    model = "dummy:llama-3.1-8b"
    run = ask(tmp_path, "mooncake", "wrong", model=model)
    _, faults, notes = shown(run)
    assert faults == []
    assert f"answers of {model} were not compared" in notes[0]
    _, _, notes = shown(ask(tmp_path, "vllm"))
    assert "no set-up with reuse=none" in notes[0]
