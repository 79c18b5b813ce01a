"""Predictions beside measured figures, of runs whose engines are known."""

from pathlib import Path

import msgspec
import pytest
from pd_runs import Bench, Engines, Result

from kvxfer.errors import InvalidUsage
from kvxfer.layout import load_model
from kvxfer.pd.plan_summary import ValidatedPoint
from kvxfer.pd.planner import EngineModel, KVSize
from kvxfer.pd.planner.predict import Models
from kvxfer.pd.planner.profile_records import engine_of, read_points
from kvxfer.pd.planner.validate import trace_of, validate

KV = KVSize.of(load_model("llama-3.1-8b"))
FITTED = ("prefill/c1-i8192-o1", "prefill/c4-i8192-o1", "kvx/c1-i8192-o128", "kvx/c4-i8192-o128")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    bench = Bench(tmp_path)
    bench.all("prefill", Engines(kind="prefill_only", jitter=0.01), [1, 4], osl=1, num_prompts=16)
    bench.all("kvx", Engines(kind="pd", jitter=0.01), [1, 4, 8], num_prompts=32)
    bench.all("agg", Engines(jitter=0.01), [4], num_prompts=32)
    return tmp_path


def errors(found: list[ValidatedPoint], setup: str, figure: str) -> dict[str, float]:
    return {
        point.load: one.error
        for point in found
        if point.setup == setup
        for one in point.comparisons
        if one.figure == figure
    }


def fit(run: Path) -> EngineModel:
    return engine_of(read_points(run), FITTED, source="a test")


def test_a_known_engine_is_predicted_where_it_was_not_fitted(run: Path) -> None:
    found = validate(read_points(run), Models(engine=fit(run), kv=KV), fitted=FITTED)
    assert {point.load for point in found if point.setup == "kvx" and not point.fitted} == {
        "c8-i8192-o128"
    }
    for figure in ("TTFT P50", "ITL P50", "TPOT P50", "requests/s"):
        assert abs(errors(found, "kvx", figure)["c8-i8192-o128"]) < 0.05, figure
    # Of an engine that does both: P99 is a gap with another's prefill in it.
    for figure in ("ITL P50", "ITL P99", "requests/s"):
        assert abs(errors(found, "agg", figure)["c4-i8192-o128"]) < 0.1, figure


def test_an_engine_of_other_costs_is_found_out(run: Path) -> None:
    right = fit(run)
    steps = msgspec.structs.replace(right.steps[0], token_s=2 * right.steps[0].token_s)
    wrong = msgspec.structs.replace(right, steps=[steps])
    found = validate(read_points(run), Models(engine=wrong, kv=KV))
    assert errors(found, "kvx", "TTFT P50")["c8-i8192-o128"] > 0.5
    assert errors(found, "agg", "ITL P99")["c4-i8192-o128"] > 0.5
    assert not any(point.fitted for point in found)


def test_the_load_is_as_it_was_sent(run: Path) -> None:
    one = next(point for point in read_points(run) if point.label == "agg/c4-i8192-o128")
    trace = trace_of(one)
    assert len(trace.requests) == 32
    assert trace.concurrency == 4
    assert {(it.num_prompt_tokens, it.num_output_tokens) for it in trace.requests} == {(8192, 128)}


def test_a_load_at_a_rate_is_predicted_as_it_was_sent(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.all("prefill", Engines(kind="prefill_only", jitter=0.01), [1, 4], osl=1, num_prompts=16)
    bench.all("kvx", Engines(kind="pd", jitter=0.01), [1, 4], num_prompts=16)

    def seldom(result: Result) -> None:  # two at a time, the second of half the length
        result["start_times"] = [1672.0 + 2.0 * (at // 2) for at in range(16)]
        result["input_lens"] = [8192, 4096] * 8
        result["ttfts"] = [result["ttfts"][0], result["ttfts"][0] * 1.5] * 8
        del result["latencies"]
        result["duration"] = 20.0  # the client's clock ran for a while before the first

    load = {"num_prompts": 16, "request_rate": 1.0, "spoil": seldom}
    bench.point("kvx", Engines(kind="pd", jitter=0.01), 64, **load)
    bench.point("kvx", Engines(kind="pd", jitter=0.01), 64, trace="mine", **load)
    points = read_points(tmp_path)
    at_a_rate = next(one for one in points if one.label == "kvx/c64-i8192-o128-r1")
    trace = trace_of(at_a_rate)
    assert trace.concurrency == 64
    assert [one.arrival_s for one in trace.requests] == [2.0 * (at // 2) for at in range(16)]
    assert [one.num_prompt_tokens for one in trace.requests] == [8192, 4096] * 8
    found = validate(points, Models(engine=engine_of(points, FITTED, source="a test"), kv=KV))
    for load in ("c64-i8192-o128-r1", "c64-i8192-o128-r1-tmine"):
        assert abs(errors(found, "kvx", "TTFT P50")[load]) < 0.1
        assert abs(errors(found, "kvx", "requests/s")[load]) < 0.1
    marked = {one.load for one in found if any("begin alike" in text for text in one.extrapolated)}
    assert marked == {"c64-i8192-o128-r1-tmine"}


def test_other_connectors_are_left_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.setup("nixl", Engines(kind="pd"), connector="nixl")
    bench.point("nixl", Engines(kind="pd"), 1, num_prompts=4)
    bench.all("kvx", Engines(kind="pd"), [1], num_prompts=4)
    bench.all("prefill", Engines(kind="prefill_only"), [1], osl=1, num_prompts=4)
    points = read_points(tmp_path)
    kvxfer = [one for one in points if one.setup.connector != "nixl"]
    models = Models(engine=engine_of(kvxfer, source="a test"), kv=KV)
    assert {point.setup for point in validate(points, models)} == {"kvx", "prefill"}
    with pytest.raises(InvalidUsage, match="no point of engines alone"):
        validate([one for one in points if one.setup.name == "nixl"], models)
