"""Each experiment on runs whose answer is known, and on records of real engines."""

import math
from pathlib import Path

import numpy as np
import pytest
from pd_runs import Bench, Engines, Result

from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.pd.experiment_result import ExperimentResult
from kvxfer.pd.experiments import goodput, gpu_count, kv_size, user_load
from kvxfer.pd.experiments.context import Context
from kvxfer.pd.experiments.options import SIZES, Options
from kvxfer.pd.experiments.registry import find_experiment, names
from kvxfer.pd.experiments.served import Served, heaviest, served_points
from kvxfer.pd.launch.launcher import Launcher
from kvxfer.pd.load.plan import LoadPlan
from kvxfer.pd.planner import load_transfer

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
H200 = RESULTS / "2026-11-30-h200x2-pd"
SMALL = LoadPlan(isl=(8192,), osl=(64,), concurrency=(1, 8), prompts_per_concurrency=4)
TWO = ("agg=aggregated,tp=2", "pd=pd")


def no_launcher() -> Launcher:
    raise NotAvailable("a test does not measure")


def context(
    out: Path, *records: Path, options: Options | None = None, simulate: bool = False
) -> Context:
    return Context(
        out=out,
        size="gpu",
        options=options or Options(),
        command=("kvxfer", "pd", "experiment", "x"),
        make_launcher=no_launcher,
        records=records,
        simulate_only=simulate,
    )


def simulated(out: Path, name: str, options: Options) -> ExperimentResult:
    return find_experiment(name).run(context(out, options=options, simulate=True))


def texts(result: ExperimentResult) -> str:
    return "\n".join(f"{one.text} [{one.how}]" for one in result.findings)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine whose gaps wait for prefills; a pair that prefills slowly and has no such gaps."""
    folder = tmp_path_factory.mktemp("known")
    bench = Bench(folder)
    bench.setup("agg", Engines(), prefill_tp=2)
    for concurrency in (1, 4, 16):
        bench.point("agg", Engines(), concurrency)
    bench.all("pd", Engines(kind="pd", prefill_s_per_token=60e-6), [1, 4, 16])
    return folder


@pytest.mark.parametrize("name", names())
def test_every_experiment_asks_and_has_every_size(name: str) -> None:
    found = find_experiment(name)
    assert found.name == name
    assert found.question.endswith("?")
    assert set(found.sizes) == set(SIZES)
    for options in found.sizes.values():
        assert options.specs() is not None
        assert options.objectives is not None


def test_an_unknown_experiment_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="agg-vs-pd"):
        find_experiment("agg")


def test_pd_wins_where_gaps_wait_and_loses_where_prefill_is_slow(
    known: Path, tmp_path: Path
) -> None:
    found = find_experiment("agg-vs-pd").run(context(tmp_path, known))
    said = texts(found)
    assert "ITL P99 of pd is lower from 4 in flight on" in said
    assert "TTFT P50 of pd is not lower at the highest load" in said
    assert "ITL P99 <= 10 ms is kept by agg up to 1 in flight, pd up to 16 in flight" in said
    assert {one.how for one in found.findings} == {"recorded"}
    assert {figure.name for figure in found.figures} == {
        f"i8192-o128-{name}" for name in ("load", "setups", "itl", "ttft")
    }
    assert found.commands[0] == "kvxfer pd experiment x"
    assert "not the same cost" not in said


def test_unequal_numbers_of_devices_are_said(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "run")
    bench.all("agg", Engines(), [4])
    bench.all("pd", Engines(kind="pd"), [4])
    found = find_experiment("agg-vs-pd").run(context(tmp_path, tmp_path / "run"))
    said = texts(found)
    assert "pd has 2 devices and agg 1: not the same cost" in said
    compared = [line for line in said.splitlines() if "of pd is" in line]
    assert compared
    assert all("of agg), 2 devices against 1 device [" in line for line in compared)


def test_records_of_two_h200s_get_a_simulated_aggregated_set_up(tmp_path: Path) -> None:
    options = Options(engine="llama-3.1-8b-h200")
    records = (H200 / "one", H200 / "two")
    found = find_experiment("agg-vs-pd").run(context(tmp_path, *records, options=options))
    hows = {one.what: one.how for one in found.sources}
    assert hows == {
        "one-kvx": "recorded",
        "two-kvx": "recorded",
        "nixl": "recorded",
        "agg-simulated": "simulated",
    }
    assert "ITL P99 of two-kvx is lower from 16 in flight on" in texts(found)
    assert any("extrapolated" in note for note in found.notes)
    other = Options(engine="gpt-oss-120b-h200")
    refused = find_experiment("agg-vs-pd").run(context(tmp_path, *records, options=other))
    assert "agg-simulated" not in {one.what for one in refused.sources}
    assert any("are of gpt-oss-120b, the records of dummy:llama" in note for note in refused.notes)
    none = find_experiment("agg-vs-pd").run(context(tmp_path, H200 / "two"))
    assert "no aggregated and PD set-ups to compare" in texts(none)


def test_a_crossing_is_got_as_its_two_set_ups_were(tmp_path: Path) -> None:
    found = find_experiment("agg-vs-pd").run(context(tmp_path, H200 / "three"))
    hows = {one.how for one in found.findings if "beyond" in one.text}
    assert hows == {"recorded"}


def test_a_serious_finding_of_the_run_is_a_fault(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "run")
    bench.setup("pd", Engines(kind="pd"))
    bench.point(
        "pd", Engines(kind="pd"), 4, spoil=lambda result: result["errors"].__setitem__(0, "gone")
    )
    found = find_experiment("goodput").run(context(tmp_path, tmp_path / "run"))
    assert any("requests failed: gone" in fault for fault in found.faults)


def test_the_simulated_articles_load_has_the_articles_answer(tmp_path: Path) -> None:
    options = Options(
        setups=("agg=aggregated,tp=4", "pd=pd,prefill-tp=2,decode-tp=2"),
        load=LoadPlan(isl=(8192,), osl=(1024,), concurrency=(32,), prompts_per_concurrency=3),
        engine="gpt-oss-120b-h100",
    )
    found = simulated(tmp_path, "agg-vs-pd", options)
    assert {one.how for one in found.sources} == {"simulated"}
    limits = {str(row[0]): row[1:] for row in found.tables[1].rows}
    assert limits["ITL P99 <= 100 ms"] == [0.0, 32.0]


def test_goodput_is_what_meets_both_limits(known: Path, tmp_path: Path) -> None:
    asked = Options(slo="ttft:1000,itl:20")
    found = find_experiment("goodput").run(context(tmp_path, known, options=asked))
    for _, throughput, _, _, percent, left in found.tables[0].rows:
        assert isinstance(percent, float)
        assert isinstance(left, float)
        assert isinstance(throughput, float)
        assert 0.0 < percent <= 30.0
        assert left == pytest.approx(throughput * percent / 100.0)
    assert "TTFT <= 1000 ms and a request's ITL max <= 20 ms leaves" in texts(found)
    panels = found.figures[0].panels
    assert [curve.y[0] for panel in panels for curve in panel.series] == [0.0] * 4  # type: ignore[union-attr]
    assert [max(curve.y) for curve in panels[0].series] == [  # type: ignore[union-attr]
        pytest.approx(row[1]) for row in found.tables[0].rows
    ]


def test_a_cap_of_requests_in_flight_is_no_load(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "run")
    bench.all("pd", Engines(kind="pd"), [1, 16])

    def rare(result: Result) -> None:
        result["duration"] *= 100.0  # so that hardly one request is in flight

    bench.point("pd", Engines(kind="pd"), 64, spoil=rare, num_prompts=8, request_rate=0.5)
    points = served_points(context(tmp_path, tmp_path / "run"))
    (chosen,) = heaviest(points)
    assert str(chosen) == "pd, 8k in, 128 out, 16 in flight"
    assert chosen.mean_in_flight == pytest.approx(16.0, rel=0.1)
    capped = next(one for one in points if one.concurrency == 64)
    assert str(capped) == "pd, 8k in, 128 out, 0.5 requests/s, at most 64 in flight"
    assert capped.mean_in_flight < 1.0


def made_point(ttft_ms: list[float], longest_ms: list[float], num_failed: int = 0) -> goodput.Point:
    from kvxfer.pd.analysis.replies import Replies
    from kvxfer.pd.summary import Load

    replies = Replies([], list(range(num_failed)), without_role=False)
    served = Served("x", Load(8, 8), 1, replies, duration_s=2.0)
    return goodput.Point(served, np.array(ttft_ms), np.array(longest_ms), np.array(longest_ms))


def test_limits_that_leave_three_of_ten() -> None:
    # Who has a late first token has short gaps, so that each limit alone is met by many.
    point = made_point([float(n) for n in range(1, 11)], [float(n) for n in range(10, 0, -1)])
    assert point.share(ttft_ms=6.0) == 0.6
    assert point.goodput(longest_ms=5.0) == 2.5
    example = goodput.tightened(point, 0.3)
    assert example.share <= 0.3
    assert point.share(example.ttft_ms, example.longest_ms) == example.share
    assert point.share(ttft_ms=example.ttft_ms) > 0.5


def test_failed_requests_are_sent_and_never_good() -> None:
    point = made_point([1.0, 2.0], [1.0, 1.0], num_failed=2)
    assert point.share() == 0.5
    assert point.goodput() == 1.0


def test_limits_are_rounded_up_to_what_gave_them() -> None:
    for value in (0.0, 1.0, 123.4, 99.96, 1234.5, 0.01234):
        rounded = goodput._rounded(value)
        assert value <= rounded <= value * 1.01


def test_kv_sizes_are_the_articles() -> None:
    said = [one.text for one in kv_size._article_findings()]
    assert said[0].startswith("llama-3.1-8b, 8,192 tokens: 1 GiB = 1.074 GB")
    assert said[1].startswith("llama-3.1-405b, 8,192 tokens: 3.938 GiB = 4.228 GB")
    assert all("agrees, in GiB" in text for text in said)


def test_transfer_times_by_link(tmp_path: Path) -> None:
    kv = kv_size.KVSize.of(kv_size.CATALOGUE["llama-3.1-8b"])
    rated = kv_size.Link("50 GB/s", 50.0)
    assert rated.time_s(kv, 8192, 1) == pytest.approx((1 << 30) / 50e9)
    assert rated.time_s(kv, 8192, 100) == pytest.approx(100 * (1 << 30) / 50e9)
    sweep = RESULTS / "2026-11-29-h200x2-models.json"
    measured = kv_size.Link("nvlink", measured=load_transfer([sweep]))
    assert measured.time_s(kv, 8192, 1) == pytest.approx(3041.8e-6, rel=1e-3)
    assert measured.time_s(kv, 8192, 10) == pytest.approx(30418e-6, rel=1e-3)
    found = find_experiment("kv-size").run(context(tmp_path, options=Options(sweeps=(sweep,))))
    assert {one.how for one in found.sources} == {"computed", "recorded"}
    assert any("llama-3.1-405b" in note for note in found.notes)  # larger than any measured
    with pytest.raises(InvalidUsage, match="3 sweeps"):
        kv_size.links_of([sweep] * 3)
    links = {one.text for one in found.findings}
    for said in ("not even one alone stays within", "; one alone stays within", " at once stay"):
        assert any(said in text for text in links)
    assert not any("; 0 at once" in text or "; 1 at once" in text for text in links)


def test_more_gpus_by_way(tmp_path: Path) -> None:
    options = Options(
        setups=("a1=aggregated", "a2=aggregated,tp=2", "pd=pd", "pd2=pd,prefill=2"),
        load=SMALL,
        engine="gpt-oss-120b-h200",
    )
    found = simulated(tmp_path, "gpu-count", options)
    said = texts(found)
    assert "aggregated, from 1 to 2 GPUs: TTFT P50" in said
    assert "2 GPUs: TTFT P50 is least with" in said
    assert "3 GPUs" not in said  # one set-up alone has three
    (figure,) = found.figures
    assert [curve.label for curve in figure.panels[0].series] == [  # type: ignore[union-attr]
        "aggregated",
        "pd 1:1",
        "pd 2:1",
    ]
    assert gpu_count.EXPERIMENT.sizes["gpu"].setups != gpu_count._SIMULATED


def test_the_rate_from_which_pd_pays(tmp_path: Path) -> None:
    options = Options(
        setups=TWO,
        load=LoadPlan(
            isl=(8192,),
            osl=(256,),
            concurrency=(256,),
            request_rates=(0.1, 2.0, 4.0),
            burstiness=(1.0, 0.25),
            duration_s=20.0,
        ),
        slo="ttft:4000,itl:p99:50",
        engine="gpt-oss-120b-h200",
    )
    found = simulated(tmp_path, "user-load", options)
    said = texts(found)
    assert "8k in, 256 out: pd pays against agg from" in said
    assert "sparse (0.1/s), pd against agg: TTFT P50" in said
    assert "burstiness 0.25" in said
    assert "trace of mixed lengths" in said
    assert len(found.tables) == 3
    assert len(found.figures) == 3
    with pytest.raises(InvalidUsage, match="--slo"):
        simulated(tmp_path, "user-load", Options(setups=TWO))


def test_records_without_a_rate_have_no_goodput_by_rate(known: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="finite rate"):
        find_experiment("user-load").run(context(tmp_path, known, options=Options(slo="ttft:1000")))


@pytest.mark.parametrize(
    ("ours", "wanted"),
    [
        ([1.0, 2.0, 3.0], "pays against a from 2 requests/s on"),
        ([1.0, 2.0, 1.0], "does not pay against a at the highest rate"),
        ([2.0, 2.0, 2.0], "pays against a from 1 requests/s on"),
        ([1.04, 1.04, 1.04], "does not pay"),
    ],
)
def test_pays_only_where_it_stays_ahead(
    ours: list[float], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def value(point: object) -> float:
        return float(str(point))

    monkeypatch.setattr(user_load, "_GOODPUT", user_load.Metric("goodput", "1/s", value))
    rates = (1.0, 2.0, 4.0)
    text = user_load.pays_from(
        "a",
        [(rate, 1.0) for rate in rates],  # type: ignore[misc]
        "b",
        list(zip(rates, ours, strict=True)),  # type: ignore[arg-type]
    )
    assert wanted in text


def test_nothing_is_simulated_without_figures_or_measured_when_told_not_to(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="--engine-figures"):
        simulated(tmp_path, "goodput", Options(setups=TWO, load=SMALL))
    only = context(tmp_path, simulate=True)
    with pytest.raises(InvalidUsage, match="--simulate"):
        only.measure([], SMALL)
    with pytest.raises(NotAvailable):
        context(tmp_path).measure([], SMALL)
    assert math.isinf(LoadPlan().request_rates[0])
