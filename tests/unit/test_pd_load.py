"""The load of a point, and what a run sees of its own faults."""

from pathlib import Path

import pytest

from kvxfer.errors import InvalidUsage
from kvxfer.pd.launch.counters import Counters
from kvxfer.pd.launch.python_site import PythonSite
from kvxfer.pd.launch.spec import parse_setup
from kvxfer.pd.load import measure
from kvxfer.pd.load.plan import LoadPlan, parse_tokens, seed_of
from kvxfer.pd.models import ServedModel
from kvxfer.pd.result import PDPoint

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


def test_tokens_are_read_as_people_write_them() -> None:
    assert parse_tokens("--isl", ["1k", "8K", "300"]) == (1024, 8192, 300)
    for text in ("", "k", "1m", "-1", "1.5k", "1" * 12):
        with pytest.raises(InvalidUsage, match="--isl"):
            parse_tokens("--isl", [text])


@pytest.mark.parametrize(
    "fields",
    [{"isl": (0,)}, {"osl": (1 << 30,)}, {"concurrency": (0,)}, {"request_rate": 0.0},
     {"request_rate": float("nan")}, {"prompts_per_concurrency": 0}],
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
    from kvxfer.pd.result import bench_path, save_point

    plan = LoadPlan(isl=(8,), osl=(2,), concurrency=(1, 2))
    bench = measure.Bench(plan=plan, site=SITE, model=ServedModel("m", "m"), logs=tmp_path)
    points = plan.points(parse_setup("a=pd"))
    assert bench.missing(points, tmp_path) == points
    save_point(tmp_path, points[0])
    assert bench.missing(points, tmp_path) == points  # its JSON is not there
    bench_path(tmp_path, points[0]).write_text("{}")
    assert bench.missing(points, tmp_path) == points[1:]
