"""Advice from pages: each verdict, each kind of server, and when a prediction counts."""

import json
from typing import Any

import pytest
from advice_pages import INTERVAL_S, Proxied, served, vllm_page
from planner_models import KV, engine_model, step_model, transfer_model

from kvxfer.cli.main import main
from kvxfer.errors import InvalidUsage, NotAvailable, PeerLost
from kvxfer.pd.advise import reading
from kvxfer.pd.advise.advice import advise
from kvxfer.pd.advise.changes import Basis, changes_of, present_setup
from kvxfer.pd.advise.observation import Observation, observe
from kvxfer.pd.advise.page import parse_page
from kvxfer.pd.advise.record import advice_json
from kvxfer.pd.advise.targets import parse_targets
from kvxfer.pd.planner.engine_model import MeasuredRange
from kvxfer.pd.planner.predict import Models

SLO = parse_targets("ttft:p99:500,itl:p99:30")


def basis(**changes: Any) -> Basis:
    transfer = transfer_model(contention=((1, 1.0), (256, 1.0)))
    models = Models(engine=engine_model(), kv=KV, transfer=transfer)
    return Basis(**({"models": models} | changes))


@pytest.mark.parametrize(
    "text",
    ["", "ttft:500", "ttft:p99", "gap:p99:5", "ttft:p101:5", "ttft:max:5", "itl:p99:0", "itl:p99:x",
     "itl:p99:nan", "ttft:p99:1,ttft:p99:2"],
)  # fmt: skip
def test_a_target_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidUsage, match="--slo"):
        parse_targets(text)


def test_a_target_is_judged_by_the_bounds_of_its_bucket() -> None:
    seen = served(200, ttft_s=0.27, gap_s=0.009)  # in the buckets 250 to 300 ms and 8 to 10 ms
    targets = "ttft:p99:300,ttft:p50:250,ttft:p90:280,itl:mean:9,itl:p50:8.5,e2el:p99:1"
    verdicts = [one.judge(seen.histograms[one.key]).verdict for one in parse_targets(targets)]
    assert verdicts == ["holds", "broken", "unclear", "holds", "unclear", "broken"]
    judged = SLO[0].judge(seen.histograms["ttft"])
    assert judged.words == "250 to 300 ms"
    assert judged.num_values == 200
    assert not judged.is_thin
    assert SLO[0].judge(served(20, ttft_s=0.27, gap_s=0.009).histograms["ttft"]).is_thin


def test_an_open_bucket_has_no_upper_bound() -> None:
    judged = SLO[0].judge(served(5, ttft_s=1000.0, gap_s=0.01).histograms["ttft"])
    assert (judged.words, judged.verdict) == ("above 4e+05 ms", "broken")


def test_a_proxy_tells_load_and_work() -> None:
    proxied = Proxied(num_prefill=2, num_decode=1, connector="lmcache")
    proxied.serve(50, ttft_s=9.0, gap_s=9.0)  # before the interval
    earlier = proxied.page()
    proxied.serve(200, ttft_s=0.2, gap_s=0.01, isl=2000, osl=21)
    proxied.metrics.num_running = 10
    proxied.metrics.requests.add("/v1/completions", "503")
    seen = proxied.seen(earlier)
    assert seen.kind == "pd"
    assert seen.connector == "lmcache"
    assert seen.requests_per_s == pytest.approx((200 + 10 + 1) / INTERVAL_S)
    assert (seen.prompt_tokens, seen.output_tokens) == (2000, 21)
    assert seen.num_failed == 1
    prefill, decode = seen.stage("prefill"), seen.stage("decode")
    assert prefill is not None
    assert decode is not None
    assert (prefill.num_engines, decode.num_engines) == (2, 1)
    assert prefill.busy == pytest.approx(200 * 0.1 / INTERVAL_S / 2)
    assert prefill.in_flight == pytest.approx(0.2)
    assert seen.in_flight == pytest.approx(200 * 0.4 / INTERVAL_S)
    assert decode.in_flight == pytest.approx(0.8 - 0.2)
    assert present_setup(seen, basis()).first_token_from == "prefill"


def test_an_idle_proxy_is_idle() -> None:
    proxied = Proxied()
    proxied.serve(50, ttft_s=9.0, gap_s=9.0)
    page = proxied.page()
    found = advise(observe(page, page, 30.0), SLO, basis())
    assert found.outcome == "idle"
    assert found.sentence.startswith("No request was there in 30 s")
    assert found.tried == ()


def test_requests_that_only_run_are_not_idle() -> None:
    proxied = Proxied()
    page = proxied.page()
    proxied.metrics.num_running = 3
    found = advise(proxied.seen(page), SLO, basis())
    assert found.outcome == "unclear"
    assert "no value" in found.sentence


def test_a_broken_ttft_gets_the_cheapest_change_that_mends_it() -> None:
    # 8000 tokens take 165 ms to prefill: 5.5 a second keep one engine busy 0.9 of the time.
    seen = served(550, ttft_s=1.5, gap_s=0.005, isl=8000, osl=100, prefill_s=1.3)
    found = advise(seen, SLO, basis())
    assert found.outcome == "broken"
    assert "TTFT P99 is 1250 to 1600 ms where 500 ms are allowed" in found.sentence
    assert "add a prefill engine (2P TP1 + 1D TP1, 3 GPUs instead of 2)" in found.sentence
    assert found.present is not None
    assert found.present.values_ms[0] > 500
    best = next(one for one in found.tried if one.change.what == "add a prefill engine")
    assert best.meets(SLO)
    assert f"TTFT P99 {best.values_ms[0]:.0f} ms" in found.sentence


def test_slack_says_what_can_be_saved() -> None:
    proxied = Proxied(num_prefill=2, num_decode=2)
    earlier = proxied.page()
    proxied.serve(100, ttft_s=0.05, gap_s=0.005, isl=1000, osl=20, prefill_s=0.03)
    found = advise(proxied.seen(earlier), SLO, basis())
    assert found.outcome == "holds"
    assert "The SLO holds at 1 requests a second of 1000 tokens in, 20 out" in found.sentence
    assert "to save 1 GPU" in found.sentence
    assert "3 GPUs instead of 4" in found.sentence


def test_no_slack_keeps_the_set_up() -> None:
    # 1.6 a second of 8000 tokens: aggregated on one GPU, gaps of 170 ms would break ITL.
    seen = served(160, ttft_s=0.4, gap_s=0.005, isl=8000, osl=100, prefill_s=0.2)
    found = advise(seen, parse_targets("ttft:p99:800,itl:p99:30"), basis())
    assert found.outcome == "holds"
    assert "keep the set-up: no change that frees a GPU" in found.sentence


def test_a_broken_itl_of_one_engine_gets_smaller_chunks_or_separation() -> None:
    gaps_s = {0.008: 9_000, 0.18: 1_000}
    seen = observe(
        parse_page(vllm_page(0)),
        parse_page(vllm_page(1000, gaps_s=gaps_s, ttft_s=0.05)),
        INTERVAL_S,
    )
    assert seen.kind == "aggregated"
    assert seen.requests_per_s == pytest.approx(10.0)
    found = advise(seen, parse_targets("ttft:p99:500,itl:p99:15"), basis(token_budget=4096))
    assert found.outcome == "broken"
    assert "ITL P99 is 150 to 200 ms where 15 ms are allowed" in found.sentence
    assert {one.change.what for one in found.tried} == {
        "set --max-num-batched-tokens to 1024",
        "set --max-num-batched-tokens to 2048",
        "set --max-num-batched-tokens to 8192",
        "add an engine",
        "separate prefill from decode, 1 to 1",
    }
    assert "separate prefill from decode, 1 to 1 (1P TP1 + 1D TP1, 2 GPUs instead of 1)" in (
        found.sentence
    )


def test_a_series_that_is_missing_is_said() -> None:
    page = vllm_page(500, without="inter_token_latency_seconds")
    seen = observe(parse_page(vllm_page(0)), parse_page(page), INTERVAL_S)
    found = advise(seen, SLO)
    assert [one.verdict for one in found.judged] == ["holds", "missing"]
    assert found.outcome == "unclear"
    assert "ITL P99: not measured by this server" in found.sentence
    broken = advise(seen, parse_targets("ttft:p99:10,itl:p99:30"))
    assert broken.outcome == "broken"
    assert "ITL P99 is not measured by this server" in broken.remarks
    missing = advise(seen, parse_targets("first_gap:p99:30"))
    assert missing.outcome == "unclear"


def test_a_page_of_others_is_refused() -> None:
    page = parse_page("go_goroutines 7\n")
    with pytest.raises(NotAvailable, match="neither of kvxfer's proxy nor of vLLM"):
        observe(page, page, 1.0)


def test_without_records_the_measured_load_speaks() -> None:
    seen = served(550, ttft_s=1.5, gap_s=0.005, isl=8000, osl=100, prefill_s=1.3)
    found = advise(seen, SLO)
    assert "add a prefill engine: prefill is busy 100% of the time" in found.sentence
    assert "give --model, --engine and --sweep for a prediction" in found.sentence
    assert "predicts" not in found.sentence
    slow = advise(served(100, ttft_s=0.1, gap_s=0.05), SLO)
    assert "add a decode engine" in slow.sentence
    handed = advise(served(100, ttft_s=1.5, gap_s=0.005, prefill_s=0.05), SLO)
    assert "look at hand-over and decode" in handed.sentence
    calm = advise(served(100, ttft_s=0.1, gap_s=0.005), SLO)
    assert "one engine for both might do: prefill is busy 10% of the time" in calm.sentence


def broken() -> Observation:
    return served(550, ttft_s=1.5, gap_s=0.005, isl=8000, osl=100, prefill_s=1.3)


def test_what_the_records_do_not_cover_is_not_predicted() -> None:
    few = MeasuredRange(num_decoding=1, num_context_tokens=1000, num_prompt_tokens=1000)
    models = Models(engine=engine_model(step_model(measured=few)), kv=KV, transfer=transfer_model())
    found = advise(broken(), SLO, Basis(models))
    assert "the records do not cover this load (TP 1: " in found.sentence
    assert "predicts" not in found.sentence
    no_sweep = advise(broken(), SLO, Basis(Models(engine=engine_model(), kv=KV)))
    assert "transfers take no time: no sweep was given" in no_sweep.sentence
    other_tp = advise(broken(), SLO, basis(prefill_tp=4))
    assert "no figures for TP 4" in other_tp.sentence


def test_a_planner_that_is_wrong_about_now_is_not_believed() -> None:
    seen = served(100, ttft_s=1.5, gap_s=0.005, isl=1000)  # it says about 30 ms
    found = advise(seen, SLO, basis())
    assert "for TTFT P99 of the present set-up is not what was measured" in found.sentence
    assert "kvxfer pd profile" in found.sentence


def test_engines_that_are_down_come_first() -> None:
    proxied = Proxied(num_prefill=2)
    earlier = proxied.page()
    proxied.serve(550, ttft_s=1.5, gap_s=0.005, isl=8000, osl=100, prefill_s=1.3)
    proxied.engines[1].down_reason = "gone"
    found = advise(proxied.seen(earlier), SLO, basis())
    assert "1 of the engines are down: bring them back first" in found.sentence
    assert "1 of 2 prefill engines are down" in found.remarks


def test_changes_of_unequal_engines_keep_their_sizes() -> None:
    seen = served(10, ttft_s=0.1, gap_s=0.01)
    setup = present_setup(seen, basis(prefill_tp=1, decode_tp=2))
    assert [one.what for one in changes_of(setup)] == [
        "add a prefill engine",
        "add a decode engine",
    ]
    equal = [one.what for one in changes_of(present_setup(seen, basis()))]
    assert equal[2:] == ["aggregate: let every engine do both", "aggregate on an engine fewer"]


def test_the_record_holds_all_of_it() -> None:
    record = json.loads(advice_json(advise(broken(), SLO, basis())))
    assert record["schema"] == "kvxfer.pd.advice/1"
    assert record["outcome"] == "broken"
    assert record["targets"][0]["above_ms"] == pytest.approx(1250)
    assert record["present"]["num_gpus"] == 2
    assert record["load"]["requests_per_s"] == pytest.approx(5.5)
    idle = Proxied()
    page = idle.page()
    empty = json.loads(advice_json(advise(observe(page, page, 1.0), SLO)))
    assert empty["load"]["prompt_tokens"] is None
    assert empty["targets"][0]["up_to_ms"] is None


def test_a_restart_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [vllm_page(900), vllm_page(5), vllm_page(105)]
    monkeypatch.setattr(reading.client, "get", lambda *_: texts.pop(0))
    told: list[str] = []
    seen = reading.watch("http://h:1/metrics", 1e-3, told=told.append)
    histogram = seen.histograms["ttft"]
    assert histogram is not None
    assert histogram.count == 100
    assert any("restarted" in text for text in told)


def test_restarts_without_end_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(range(9, 0, -1))
    monkeypatch.setattr(reading.client, "get", lambda *_: vllm_page(next(counts)))
    with pytest.raises(PeerLost, match="restarted in each of 3 intervals"):
        reading.watch("http://h:1", 1e-3)


@pytest.mark.parametrize(("engines", "said"), [(1, "1 engine: "), (2, "2 engines: ")])
def test_a_bare_engine_is_called_one_and_nothing_is_simulated_without_figures(
    engines: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [vllm_page(0, engines=engines), vllm_page(100, engines=engines)]
    monkeypatch.setattr(reading.client, "get", lambda *_: texts.pop(0))
    words = ("--metrics", "http://h:1", "--slo", "ttft:p99:5000", "--interval", "0.01")
    assert main(("pd", "advise", *words)) == 0
    told = capsys.readouterr()
    assert any(line.startswith(said) for line in told.out.splitlines())
    assert "simulating" not in told.err
