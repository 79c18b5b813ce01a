"""Strategies differ in the direction that their sources claim, on one trace each."""

from typing import Any

import numpy as np
import pytest
from planner_models import DECODE_S, KV, engine_model, step_model, transfer_model

from kvxfer.pd.planner import RemoteStore, Request, Setup, SimulatedRun, Strategy, Trace, simulate
from kvxfer.pd.planner.simulation.prefix_cache import PrefixCache
from kvxfer.pd.planner.traces import closed_loop, open_loop

BATCHINGS = ("static", "dynamic", "continuous")
LONG = 30_000
# A long prompt every 2 s, and short ones in between.
MIXED = Trace(
    "mixed",
    tuple(
        sorted(
            [Request(2.0 * at, LONG, 100) for at in range(10)]
            + [Request(0.01 + 0.1 * at, 200, 100) for at in range(200)],
            key=lambda one: one.arrival_s,
        )
    ),
)


def run(trace: Trace, strategy: Strategy | None = None, **fields: Any) -> SimulatedRun:
    steps = fields.pop("steps", step_model())
    fields = {"kind": "aggregated", "token_budget": 2048} | fields
    setup = Setup(**fields, strategy=strategy or Strategy())
    transfer = transfer_model() if setup.kind == "pd" else None
    return simulate(setup, trace, engine_model(steps), KV, transfer)


def ttft_s(found: SimulatedRun, percent: float, *, long: bool = False) -> float:
    chosen = (found.num_prompt_tokens == LONG) == long
    return float(np.percentile(found.ttft_s[chosen], percent))


def test_a_long_prompt_blocks_those_behind_it() -> None:
    found = run(MIXED)
    assert ttft_s(found, 99) > 10 * ttft_s(found, 50)


def test_request_parallel_prefill_is_a_fast_lane_for_short_prompts() -> None:
    plain = run(MIXED)
    parallel = run(MIXED, Strategy(num_parallel_prefills=4, num_long_prefills=1))
    assert ttft_s(parallel, 99) < 0.25 * ttft_s(plain, 99)
    assert ttft_s(parallel, 50, long=True) >= ttft_s(plain, 50, long=True)
    # the stall of those that decode stays: the budget of a step is as large
    assert parallel.gaps.percentile_s(99) > 5 * DECODE_S


def test_long_prompts_stay_one_at_a_time_in_parallel_prefill() -> None:
    two = Trace("two long ones", (Request(0.0, LONG, 2), Request(0.0, LONG, 2)))
    one_by_one = run(two, Strategy(num_parallel_prefills=4, num_long_prefills=1))
    together = run(two, Strategy(num_parallel_prefills=4, num_long_prefills=2))
    assert one_by_one.ttft_s[0] < 0.6 * one_by_one.ttft_s[1]
    assert together.ttft_s[0] > 0.9 * together.ttft_s[1]


def test_a_penalty_lets_short_prompts_pass_and_ends() -> None:
    crowd = Trace(
        "crowd", (*[Request(0.0, LONG, 2)] * 3, *[Request(0.01 * at, 200, 2) for at in range(60)])
    )
    plain, penalised = run(crowd), run(crowd, Strategy(long_penalty_s=5.0))
    assert ttft_s(penalised, 50) < 0.5 * ttft_s(plain, 50)
    assert ttft_s(penalised, 50, long=True) > ttft_s(plain, 50, long=True)
    # a step's stall is as long once the long prompt runs
    assert penalised.gaps.values_s.max() == pytest.approx(plain.gaps.values_s.max(), rel=0.1)


def test_dedicated_engines_keep_long_prompts_from_short_ones() -> None:
    shared = run(MIXED, num_prefill=2)
    dedicated = run(MIXED, Strategy(num_long_engines=1), num_prefill=2)
    assert ttft_s(dedicated, 99) < 0.2 * ttft_s(shared, 99)
    short = np.flatnonzero(shared.num_prompt_tokens < LONG)
    longest_s = [max(one.gaps_of(at).max() for at in short) for one in (shared, dedicated)]
    assert longest_s[1] < 2.5 * DECODE_S < longest_s[0]
    assert shared.setup.num_gpus == dedicated.setup.num_gpus == 2


def test_disaggregated_prefill_keeps_gaps_steady() -> None:
    together = run(MIXED, num_prefill=2)
    apart = run(MIXED, kind="pd", num_decode=1)
    assert together.gaps.percentile_s(100) > 5 * DECODE_S
    assert apart.gaps.percentile_s(100) == pytest.approx(DECODE_S)


def test_continuous_batching_beats_batches() -> None:
    requests = [Request(0.05 * at, 100, 20 + 60 * (at % 4)) for at in range(80)]
    trace = Trace("uneven", tuple(requests))
    static, dynamic, continuous = (
        run(trace, Strategy(batching=kind, batch_size=8)) for kind in BATCHINGS
    )
    assert continuous.ttft_s.mean() < 0.1 * min(static.ttft_s.mean(), dynamic.ttft_s.mean())
    assert continuous.duration_s < min(static.duration_s, dynamic.duration_s)


def test_a_window_bounds_the_wait_for_a_batch_under_a_light_load() -> None:
    trace = Trace("light", tuple(Request(0.5 * at, 100, 20) for at in range(40)))
    static, dynamic, continuous = (
        run(trace, Strategy(batching=kind, batch_size=8)).ttft_s.mean() for kind in BATCHINGS
    )
    assert continuous < 0.2 * dynamic < 0.02 * static


def test_a_dynamic_batch_starts_when_its_window_closes() -> None:
    trace = Trace("two", (Request(0.0, 100, 5), Request(0.04, 100, 5), Request(9.0, 100, 5)))
    found = run(trace, Strategy(batching="dynamic", batch_size=8, batch_window_s=0.1))
    assert found.queue_s == pytest.approx([0.1, 0.06, 0.1])
    static = run(trace, Strategy(batching="static", batch_size=2))
    assert static.queue_s == pytest.approx([0.04, 0.0, 0.0])  # the last one alone: none will come
    assert len(set(found.gaps_of(0)) | set(static.gaps_of(0))) == 1


def test_chunks_bound_the_stall_that_whole_prompts_make() -> None:
    whole = run(MIXED, Strategy(batching="continuous"))
    chunked = run(MIXED)
    budget_s = 2048 * 20e-6 + 2 * DECODE_S
    assert whole.gaps.percentile_s(100) > LONG * 20e-6
    assert chunked.gaps.percentile_s(100) < budget_s
    # a smaller budget makes more gaps shorter
    small = run(MIXED, token_budget=512)
    assert small.gaps.percentile_s(100) < chunked.gaps.percentile_s(100)
    assert small.gaps.share_above(1.2 * DECODE_S) > chunked.gaps.share_above(1.2 * DECODE_S)


def test_prefix_reuse_shortens_the_prefill_by_what_it_finds() -> None:
    trace = closed_loop(isl=8192, osl=2, concurrency=1, num_requests=5, shared_tokens=4096)
    plain, cached = run(trace), run(trace, Strategy(prefix_cache=True))
    assert cached.num_hit_tokens.tolist() == [0, 4096, 4096, 4096, 4096]
    assert cached.ttft_s[0] == plain.ttft_s[0]
    assert (cached.ttft_s[1:] < 0.55 * plain.ttft_s[1:]).all()


def test_a_whole_hit_computes_one_token() -> None:
    trace = closed_loop(isl=512, osl=2, concurrency=1, num_requests=2, shared_tokens=512)
    found = run(trace, Strategy(prefix_cache=True))
    assert found.num_hit_tokens.tolist() == [0, 511]
    assert found.ttft_s[1] == pytest.approx(DECODE_S)


def test_a_store_serves_all_engines_at_its_bandwidth() -> None:
    trace = Trace(
        "far apart", tuple(Request(10.0 * at, 8192, 2, (0,)) for at in range(4)), hash_tokens=4096
    )
    own = run(trace, Strategy(prefix_cache=True, routing="round_robin"), num_prefill=4)
    assert own.num_hit_tokens.tolist() == [0, 0, 0, 0]
    waits_s = {}
    for gb_per_s in (5.0, 50.0):
        store = RemoteStore(gb_per_s=gb_per_s, latency_s=1e-3)
        found = run(trace, Strategy(store=store, routing="round_robin"), num_prefill=4)
        assert found.num_hit_tokens.tolist() == [0, 4096, 4096, 4096]
        computed_s = own.ttft_s[1] - 4096 * 20e-6 - 2 * DECODE_S  # two steps of four
        waits_s[gb_per_s] = found.ttft_s[1] - computed_s
    num_bytes = 4096 * KV.bytes_per_token
    assert waits_s[5.0] == pytest.approx(1e-3 + num_bytes / 5e9)
    assert waits_s[50.0] == pytest.approx(1e-3 + num_bytes / 50e9)


def test_loads_share_the_bandwidth_of_the_store() -> None:
    first = Request(0.0, 8192, 2, (0,))
    later = [Request(10.0, 8192, 2, (0,))] * 2
    trace = Trace("two at once", (first, *later), hash_tokens=8000)
    strategy = Strategy(store=RemoteStore(gb_per_s=5.0), routing="round_robin")
    shared = run(trace, strategy, num_prefill=2).ttft_s
    alone = run(Trace("one", (first, later[0]), hash_tokens=8000), strategy, num_prefill=2).ttft_s
    load_s = 8000 * KV.bytes_per_token / 5e9
    assert shared[1] == pytest.approx(alone[1] + load_s)


def test_kv_aware_routing_finds_more_of_its_prefixes() -> None:
    rng = np.random.default_rng(1)
    requests = [
        Request(0.3 * at, 4096, 10, (int(group), 100 + int(group)))
        for at, group in enumerate(rng.integers(0, 8, 200))
    ]
    trace = Trace("groups", tuple(requests), hash_tokens=1800)
    hits = {
        routing: run(
            trace,
            Strategy(prefix_cache=True, routing=routing),
            num_prefill=4,
            steps=step_model(kv_capacity_tokens=16_000),
        )
        for routing in ("round_robin", "kv_aware")
    }
    blind, aware = (hits[name].num_hit_tokens.sum() for name in ("round_robin", "kv_aware"))
    assert aware > 1.5 * blind
    assert hits["kv_aware"].ttft_s.mean() < hits["round_robin"].ttft_s.mean()


def test_round_robin_goes_in_turn_and_least_loaded_does_not() -> None:
    # every second request is heavy: in turn, they all go to one engine
    trace = Trace("odd", tuple(Request(0.08 * at, (6000, 50)[at % 2], 60) for at in range(60)))
    found = {
        routing: run(trace, Strategy(routing=routing), num_prefill=2)
        for routing in ("round_robin", "least_loaded")
    }
    busy = {name: max(one.busy) - min(one.busy) for name, one in found.items()}
    assert busy["round_robin"] > busy["least_loaded"]


def test_fp8_halves_what_moves_and_doubles_what_fits() -> None:
    trace = open_loop(isl=8192, osl=50, requests_per_s=3.0, num_requests=30)
    steps = step_model(context_s=40e-9, kv_capacity_tokens=20_000)
    plain = run(trace, kind="pd", num_decode=1, steps=steps)
    narrow = run(trace, Strategy(kv_dtype="fp8"), kind="pd", num_decode=1, steps=steps)
    assert narrow.transfer_s.min() == pytest.approx(plain.transfer_s.min() / 2)
    assert narrow.kv_capacity_tokens == (40_000, 40_000)
    assert narrow.gaps.percentile_s(50) < plain.gaps.percentile_s(50)
    assert "fp8 KV" in narrow.extrapolated[-1]


def test_a_cache_drops_what_was_used_least_recently_and_ends_before_beginnings() -> None:
    cache = PrefixCache(10, capacity_tokens=40)
    cache.insert((1, 2))
    cache.insert((3, 4))
    cache.insert((1, 2))
    cache.insert((5, 6))
    assert [cache.hit_tokens(one) for one in ((1, 2), (3, 4), (5, 6))] == [20, 0, 20]
    cache.shrink(35)
    assert cache.num_tokens == 30
    assert cache.hit_tokens((1, 2)) == 10
    assert cache.hit_tokens((9, 1)) == 0
    cache.shrink(-5)
    assert cache.num_tokens == 0
