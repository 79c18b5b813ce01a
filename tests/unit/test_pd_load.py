"""The load of a point, and what a run sees of its own faults."""

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.pd.experiments.mixed_trace import write_mixed_trace
from kvxfer.pd.launch.counters import Counters
from kvxfer.pd.launch.launcher import Launcher
from kvxfer.pd.launch.python_site import PythonSite
from kvxfer.pd.launch.spec import parse_setup
from kvxfer.pd.load import measure, run
from kvxfer.pd.load.plan import LoadPlan, parse_tokens, seed_of
from kvxfer.pd.load.replay import read_replay
from kvxfer.pd.load.run import Watchers, run_setups
from kvxfer.pd.models import ServedModel
from kvxfer.pd.result import SETUP_FILE, PDPoint, bench_path, save_point, save_setup

SITE = PythonSite("/py", is_cpu=True, has_flashinfer=False, versions={})
POINT = PDPoint(concurrency=2, num_prompts=20, isl=100, osl=10)


def test_the_articles_load_is_the_default() -> None:
    points = LoadPlan().points(parse_setup("a=pd"))
    assert [(p.isl, p.osl, p.concurrency, p.num_prompts) for p in points] == [
        (isl, 1024, c, 10 * c) for isl in (1024, 8192) for c in (1, 2, 4, 8, 16, 32)
    ]


def test_an_engine_that_prefills_alone_answers_one_token() -> None:
    points = LoadPlan(concurrency=(1, 4)).points(parse_setup("a=prefill_only"))
    assert {point.osl for point in points} == {1}
    assert len(points) == 4


def test_no_two_points_have_the_same_prompts() -> None:
    points = LoadPlan().points(parse_setup("a=pd"))
    assert len({seed_of(point) for point in points}) == len(points)
    # Set-ups are compared on the same ones.
    assert [seed_of(p) for p in LoadPlan().points(parse_setup("b=aggregated"))] == [
        seed_of(p) for p in points
    ]


def test_the_client_sends_nothing_before_its_clock_runs() -> None:
    model = ServedModel("m", "/folder/m")
    words = LoadPlan(extra_args=("--x",)).words(POINT, SITE, model, "http://h:1", "served")
    told = dict(zip(words[3::2], words[4::2], strict=False))
    assert (told["--ready-check-timeout-sec"], told["--num-warmups"]) == ("0", "0")
    assert (told["--random-input-len"], told["--random-output-len"]) == ("100", "10")
    assert (told["--num-prompts"], told["--max-concurrency"]) == ("20", "2")
    assert (told["--model"], told["--tokenizer"]) == ("served", "/folder/m")
    assert told["--request-rate"] == "inf"
    assert words[-1] == "--x"
    assert "--ignore-eos" in words


def test_a_rate_brings_its_own_number_of_prompts_and_name() -> None:
    plan = LoadPlan(
        isl=(8,), osl=(2,), concurrency=(64,), request_rates=(0.5, 4.0, math.inf),
        burstiness=(1.0, 0.25), duration_s=30.0,
    )  # fmt: skip
    points = plan.points(parse_setup("a=pd"))
    assert [(point.stem, point.num_prompts) for point in points] == [
        ("c64-i8-o2-r0.5", 15),
        ("c64-i8-o2-r4", 120),
        ("c64-i8-o2", 640),
        ("c64-i8-o2-r0.5-b0.25", 15),
        ("c64-i8-o2-r4-b0.25", 120),
    ]
    assert len({seed_of(point) for point in points}) == len(points)
    short = replace(plan, duration_s=1.0).points(parse_setup("a=pd"))
    assert short[0].num_prompts == 10
    with pytest.raises(InvalidUsage, match="make it shorter"):
        replace(plan, request_rates=(9e4,)).points(parse_setup("a=pd"))


def test_the_client_is_told_rate_and_burstiness() -> None:
    plan = LoadPlan(isl=(8,), osl=(2,), request_rates=(2.5,), burstiness=(0.5,))
    point = plan.points(parse_setup("a=pd"))[0]
    words = plan.words(point, SITE, ServedModel("m", "m"), "http://h:1", "served")
    told = dict(zip(words[3::2], words[4::2], strict=False))
    assert (told["--request-rate"], told["--burstiness"]) == ("2.5", "0.5")
    closed = LoadPlan().words(POINT, SITE, ServedModel("m", "m"), "http://h:1", "served")
    assert "--burstiness" not in closed


def test_a_trace_is_sent_as_it_is(tmp_path: Path) -> None:
    path = write_mixed_trace(
        tmp_path / "a mixed-trace.jsonl", num_requests=20, longest=512, osl=8, requests_per_s=2.0
    )
    replay = read_replay(path)
    plan = LoadPlan(concurrency=(4, 16), replay=replay)
    points = plan.points(parse_setup("a=pd"))
    assert [point.concurrency for point in points] == [4, 16]
    assert {(point.num_prompts, point.trace) for point in points} == {(20, "a_mixed_trace")}
    requests = replay.trace.requests
    assert points[0].isl == round(sum(one.num_prompt_tokens for one in requests) / 20)
    words = plan.words(points[0], SITE, ServedModel("m", "m"), "http://h:1", "served")
    told = dict(zip(words[3::2], words[4::2], strict=False))
    assert told["--dataset-name"] == "timed_trace"
    assert told["--dataset-path"] == str(path)
    assert told["--timed-trace-chunk-hash-size"] == "16"
    assert told["--timed-trace-sec-multiplier"] == "1"
    assert "--random-input-len" not in told
    assert "--request-rate" not in told
    # Prompts that begin alike are told so.
    firsts = [one.prefix_hashes[0] for one in requests]
    assert 1 < len(set(firsts)) < len(firsts)


def test_a_trace_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2]}\n'
    )
    with pytest.raises(InvalidUsage, match="stand for 32"):
        read_replay(path)
    with pytest.raises(InvalidUsage, match="no CSV"):
        read_replay(tmp_path / "t.csv")
    with pytest.raises(InvalidUsage, match="up to 8 tokens in"):
        write_mixed_trace(path, num_requests=1, longest=8, osl=1, requests_per_s=1.0)


def test_tokens_are_read_as_people_write_them() -> None:
    assert parse_tokens("--isl", ["1k", "8K", "300"]) == (1024, 8192, 300)
    for text in ("", "k", "1m", "-1", "1.5k", "1" * 12):
        with pytest.raises(InvalidUsage, match="--isl"):
            parse_tokens("--isl", [text])


@pytest.mark.parametrize(
    "fields",
    [{"isl": (0,)}, {"osl": (1 << 30,)}, {"concurrency": (0,)}, {"request_rates": (0.0,)},
     {"request_rates": (float("nan"),)}, {"burstiness": (math.inf,)}, {"duration_s": 0.0},
     {"prompts_per_concurrency": 0}],
)  # fmt: skip
def test_a_load_out_of_range_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidUsage):
        LoadPlan(**fields)  # type: ignore[arg-type]


def counted(prefill: Counters, decode: Counters) -> PDPoint:
    return measure._with_counts(POINT, (Counters(), Counters()), (prefill, decode))


def test_what_engines_counted_is_kept() -> None:
    found = counted(
        Counters(num_prompt_tokens=9), Counters(num_prompt_tokens=7, num_output_tokens=3)
    )
    assert (found.served_prompt_tokens, found.served_output_tokens) == (7, 3)
    assert found.findings == []


def test_prompts_out_of_the_prefix_cache_are_found() -> None:
    at_most = POINT.num_prompts * POINT.isl // 100
    assert counted(Counters(num_cached_tokens=at_most), Counters()).findings == []
    (finding,) = counted(Counters(num_cached_tokens=at_most + 1), Counters()).findings
    assert "prefix cache" in finding


def test_preemptions_are_found_and_one_engine_is_counted_once() -> None:
    same = Counters(num_preemptions=3)
    (finding,) = counted(same, same).findings
    assert finding.startswith("3 preemptions")
    (finding,) = counted(same, Counters(num_preemptions=1)).findings
    assert finding.startswith("4 preemptions")


def test_engines_that_count_nothing_say_nothing() -> None:
    assert measure._with_counts(POINT, (None, None), (None, Counters())) == POINT


def test_an_engine_that_is_busy_before_the_point_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = measure.Target(url="u", model="m", prefill_urls=("a",), decode_urls=("a", "b"))
    running = {"a": 2, "b": 0}
    monkeypatch.setattr(measure, "read_counters", lambda url: Counters(num_running=running[url]))
    monkeypatch.setattr(measure, "_IDLE_S", 0.0)
    (finding,) = measure._busy(target)
    assert finding.startswith("2 requests ran")
    running["a"] = 0
    assert list(measure._busy(target)) == []


def test_what_a_folder_holds_is_not_missing(tmp_path: Path) -> None:
    plan = LoadPlan(isl=(8,), osl=(2,), concurrency=(1, 2))
    bench = measure.Bench(plan=plan, site=SITE, model=ServedModel("m", "m"), logs=tmp_path)
    points = plan.points(parse_setup("a=pd"))
    assert bench.missing(points, tmp_path) == points
    save_point(tmp_path, points[0])
    assert bench.missing(points, tmp_path) == points  # its JSON is not there
    bench_path(tmp_path, points[0]).write_text("{}")
    assert bench.missing(points, tmp_path) == points[1:]


RUN = replace(LoadPlan(), isl=(8,), osl=(2,), concurrency=(1,), extra_args=("--x", "1"))


def resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, url: str, serves: str | None, plan: LoadPlan
) -> list[PDPoint]:
    """What is missing of a server whose one point was measured, as ``m`` at ``http://h:1``."""

    def served_name(asked: str, timeout_s: float) -> str:
        if serves is None:
            raise NotAvailable(f"{asked} does not answer")
        return serves

    monkeypatch.setattr(run, "served_name", served_name)
    launcher = Launcher(site=SITE, model=ServedModel("tiny", "tiny"), logs=folder)
    bench = measure.Bench(plan=plan, site=SITE, model=launcher.model, logs=folder)
    spec = parse_setup(f"a=external,url={url}")
    if not (folder / SETUP_FILE).exists():
        record = run.record_of(parse_setup("a=external,url=http://h:1"), launcher, RUN.extra_args)
        save_setup(folder, msgspec.structs.replace(record, served_name="m"))
        (point,) = RUN.points(spec)
        save_point(folder, point)
        bench_path(folder, point).write_text("{}")
    return run.missing_points(spec, launcher, bench, folder)


def test_figures_of_one_server_and_client_are_not_another_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = {"url": "http://h:1", "serves": "m", "plan": RUN}
    for told in (same, {**same, "serves": None}):  # one that is down cannot say what it serves
        assert resumed(tmp_path, monkeypatch, **told) == []  # type: ignore[arg-type]
    others = {"url": "http://h:2", "serves": "n", "plan": replace(RUN, extra_args=())}
    for field, value in others.items():
        with pytest.raises(InvalidUsage, match="another --out"):
            resumed(tmp_path, monkeypatch, **{**same, field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("out", ["a file", "a file in the way", "/proc/x"])
def test_no_engine_starts_for_records_that_cannot_be_kept(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("engines started")

    monkeypatch.setattr(Launcher, "start", start)
    model = ServedModel("m", "m")
    launcher = Launcher(site=SITE, model=model, logs=tmp_path / "logs")
    bench = measure.Bench(plan=LoadPlan(), site=SITE, model=model, logs=launcher.logs)
    (tmp_path / "a file").write_text("")
    (tmp_path / "a file in the way").mkdir()
    (tmp_path / "a file in the way" / "b").write_text("")
    specs = [parse_setup("a=aggregated"), parse_setup("b=pd")]
    with pytest.raises(InvalidUsage, match="cannot make the folder"):
        run_setups(specs, launcher, bench, tmp_path / out, Watchers())


def test_an_address_that_is_none_is_no_server_without_models() -> None:
    with pytest.raises(InvalidUsage, match="is no http://HOST:PORT"):
        measure.served_name("http://127.0.0.1:99999", 1.0)
