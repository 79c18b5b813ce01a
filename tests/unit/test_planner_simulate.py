"""The simulation: against a closed form, an engine stepped one by one, and what must hold."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_engine import serve
from planner_models import DECODE_S, KV, engine_model, step_model, transfer_model

from kvxfer.errors import InvalidUsage
from kvxfer.pd.analysis.stalls import expected_share
from kvxfer.pd.planner import RemoteStore, Request, Setup, SimulatedRun, Strategy, Trace, simulate
from kvxfer.pd.planner.engine_model import DecodePoint, MeasuredRange
from kvxfer.pd.planner.traces import closed_loop, open_loop

AGGREGATED = Setup(kind="aggregated")
PD = Setup(kind="pd", num_decode=1)
CURVED = step_model(
    decode=[DecodePoint(1, 4e-3), DecodePoint(8, 5e-3), DecodePoint(64, 9e-3)],
    context_s=2e-6,
    prefill_base_s=6e-3,
    token_s=18e-6,
    pair_s=2e-9,
)


def run(setup: Setup, trace: Trace, *steps: Any, transfer: Any = None, **changes: Any):
    return simulate(setup, trace, engine_model(*steps, **changes), KV, transfer)


@pytest.mark.parametrize(
    ("concurrency", "isl", "chunks"), [(4, 8192, 1), (8, 4096, 2), (16, 512, 1)]
)
def test_stalled_gaps_are_the_share_of_the_closed_form(
    concurrency: int, isl: int, chunks: int
) -> None:
    """Of ``rounds`` prefills of each other request, all but half of the first are seen whole.

    The budget leaves room for the decodes, so that no prompt is split for them.
    """
    rounds, osl, budget = 10, 257, isl // chunks + concurrency
    trace = closed_loop(
        isl=isl, osl=osl, concurrency=concurrency, num_requests=rounds * concurrency
    )
    gaps = run(Setup(kind="aggregated", token_budget=budget, max_num_seqs=64), trace).gaps
    expected = expected_share(concurrency=concurrency, isl=isl, osl=osl, token_budget=budget)
    assert gaps.share_above(1.5 * DECODE_S) == pytest.approx(
        expected * (1 - 0.5 / rounds), rel=0.01
    )
    percent = 100 * (1 - expected)
    assert gaps.percentile_s(percent - 1) == pytest.approx(DECODE_S)
    assert gaps.percentile_s(percent + 1) > 2 * DECODE_S


def test_decode_engines_have_no_stalls() -> None:
    trace = closed_loop(isl=8192, osl=257, concurrency=8)
    assert run(AGGREGATED, trace).gaps.share_above(1.5 * DECODE_S) > 0.02
    assert run(PD, trace, transfer=transfer_model()).gaps.share_above(1.5 * DECODE_S) == 0.0


requests = st.builds(
    Request,
    st.floats(0.0, 2.0),
    st.integers(1, 3000),
    st.integers(1, 40),
    st.sampled_from([(), (0,), (0, 1), (0, 1, 2), (9,)]),
)
traces = st.builds(
    lambda found, concurrency: Trace(
        "drawn", tuple(sorted(found, key=lambda one: one.arrival_s)), concurrency
    ),
    st.lists(requests, min_size=1, max_size=12),
    st.none() | st.integers(1, 4),
)


@settings(max_examples=40)
@given(
    st.lists(requests, min_size=1, max_size=12),
    st.sampled_from([16, 100, 1000, 5000]),
    st.integers(1, 12),
)
def test_jumps_change_nothing(found: list[Request], budget: int, max_num_seqs: int) -> None:
    trace = Trace("drawn", tuple(sorted(found, key=lambda one: one.arrival_s)))
    tokens = serve(trace, CURVED, budget=budget, max_num_seqs=max_num_seqs)
    setup = Setup(kind="aggregated", token_budget=budget, max_num_seqs=max_num_seqs)
    found_run = run(setup, trace, CURVED)
    firsts = [times[0] - one.arrival_s for times, one in zip(tokens, trace.requests, strict=True)]
    lasts = [times[-1] - one.arrival_s for times, one in zip(tokens, trace.requests, strict=True)]
    assert found_run.ttft_s == pytest.approx(firsts)
    assert found_run.e2el_s == pytest.approx(lasts)
    for at, times in enumerate(tokens):
        assert found_run.gaps_of(at) == pytest.approx(np.diff(times), rel=0.02)


def check(found: SimulatedRun, trace: Trace) -> None:
    """What holds of every run."""
    outputs = [one.num_output_tokens for one in trace.requests]
    assert found.num_output_tokens.tolist() == outputs
    assert found.gaps.num_samples == pytest.approx(sum(outputs) - len(outputs))
    many = sum(count > 1 for count in outputs)
    assert found.later_gaps.num_samples == pytest.approx(sum(outputs) - len(outputs) - many)
    for at, count in enumerate(outputs):
        gaps_s = found.gaps_of(at)
        assert len(gaps_s) == count - 1
        assert (gaps_s > 0.0).all()
        assert found.ttft_s[at] + gaps_s.sum() == pytest.approx(found.e2el_s[at])
        if count > 1:
            assert gaps_s[0] == pytest.approx(found.first_gap_s[at])
    assert (found.queue_s >= -1e-9).all()
    assert (found.ttft_s > found.queue_s).all()
    assert (found.transfer_s >= -1e-9).all()
    pooled_s = found.gaps.values_s @ found.gaps.counts
    assert pooled_s == pytest.approx((found.e2el_s - found.ttft_s).sum())
    if trace.concurrency is not None:
        ends_s = found.sent_s + found.e2el_s
        for at_s in found.sent_s:
            in_flight = (found.sent_s <= at_s) & (ends_s > at_s + 1e-9)
            assert in_flight.sum() <= trace.concurrency
    for peak, capacity in zip(found.peak_kv_tokens, found.kv_capacity_tokens, strict=True):
        assert capacity is None or peak <= capacity
    assert all(0.0 <= share <= 1.0 + 1e-9 for share in found.busy)


BATCHINGS = [
    Strategy(batching="static", batch_size=3),
    Strategy(batching="dynamic", batch_size=3, batch_window_s=0.05),
    Strategy(batching="continuous"),
    Strategy(),
    Strategy(num_parallel_prefills=3, num_long_prefills=1, long_prompt_tokens=1000),
    Strategy(long_penalty_s=0.5, long_prompt_tokens=1000, routing="round_robin"),
    Strategy(num_long_engines=1, long_prompt_tokens=1000),
    Strategy(prefix_cache=True, routing="kv_aware", store=RemoteStore(gb_per_s=10.0)),
]
SHAPES = [
    {"kind": "aggregated", "num_prefill": 2},
    {"kind": "pd", "num_prefill": 2, "num_decode": 2},
    {"kind": "pd", "num_prefill": 2, "num_decode": 1, "first_token_from": "prefill"},
    {"kind": "pd", "num_prefill": 3, "num_decode": 1, "send": "layers", "engines_per_link": 2},
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strategy", BATCHINGS)
@settings(max_examples=4)
@given(traces, st.sampled_from([None, 3100, 5000]))
def test_what_holds_of_every_run(
    strategy: Strategy, shape: dict[str, Any], trace: Trace, capacity: int | None
) -> None:
    """Every token comes once, times add up, and memory and concurrency keep their limits."""
    setup = Setup(**shape, strategy=strategy, token_budget=512, max_num_seqs=4)
    steps = step_model(kv_capacity_tokens=capacity, context_s=1e-7, request_s=1e-3)
    check(run(setup, trace, steps, transfer=transfer_model(control_s=1e-3)), trace)


def test_a_memory_that_is_too_small_puts_requests_back() -> None:
    trace = closed_loop(isl=100, osl=400, concurrency=4, num_requests=12)
    tight = run(AGGREGATED, trace, step_model(kv_capacity_tokens=1200))
    loose = run(AGGREGATED, trace, step_model(kv_capacity_tokens=4000))
    check(tight, trace)
    assert sum(tight.num_preempted) > 0 == sum(loose.num_preempted)
    assert tight.duration_s > loose.duration_s
    assert max(tight.peak_kv_tokens) <= 1200


def test_a_request_that_never_fits_is_refused() -> None:
    trace = closed_loop(isl=1000, osl=100, concurrency=1)
    small = step_model(kv_capacity_tokens=1100)
    with pytest.raises(InvalidUsage, match="needs 1116 tokens of KV, and an engine has 1100"):
        run(AGGREGATED, trace, small)
    with pytest.raises(InvalidUsage, match="needs 1116"):
        run(PD, trace, small)
    run(AGGREGATED, trace, step_model(kv_capacity_tokens=1117))


def test_the_same_arguments_give_the_same_run() -> None:
    def once() -> SimulatedRun:
        trace = open_loop(isl=700, osl=50, requests_per_s=20.0, num_requests=60, seed=3)
        setup = Setup(kind="pd", num_prefill=2, num_decode=2)
        return run(setup, trace, step_model(jitter=[0.9, 1.1]), transfer=transfer_model())

    one, two = once(), once()
    for name in ("ttft_s", "first_gap_s", "e2el_s", "transfer_s"):
        assert (getattr(one, name) == getattr(two, name)).all(), name
    assert (one.gaps_of(7) == two.gaps_of(7)).all()
    assert (one.gaps.values_s == two.gaps.values_s).all()


def test_the_first_token_comes_from_where_it_is_said_to() -> None:
    trace = closed_loop(isl=8192, osl=10, concurrency=1, num_requests=1)
    slow = transfer_model(gb_per_s=10.0, control_s=5e-3)  # 107 ms, and 5
    alone = run(AGGREGATED, trace)
    decode = run(PD, trace, transfer=slow)
    prefill = run(Setup(kind="pd", num_decode=1, first_token_from="prefill"), trace, transfer=slow)
    handover_s = 8192 * KV.bytes_per_token / 10e9 + 5e-3
    assert decode.transfer_s[0] == pytest.approx(handover_s)
    assert decode.ttft_s[0] == pytest.approx(alone.ttft_s[0] + handover_s + DECODE_S)
    assert decode.first_gap_s[0] == pytest.approx(DECODE_S)
    assert prefill.ttft_s[0] == pytest.approx(alone.ttft_s[0])
    assert prefill.first_gap_s[0] == pytest.approx(handover_s + DECODE_S)
    assert decode.e2el_s[0] == pytest.approx(prefill.e2el_s[0] + DECODE_S)


def test_what_is_sent_meanwhile_is_not_waited_for() -> None:
    trace = closed_loop(isl=8192, osl=10, concurrency=1, num_requests=1)
    whole_s = 8192 * KV.bytes_per_token / 100e9
    waits_s = {
        send: run(
            Setup(kind="pd", num_decode=1, send=send, token_budget=2048),
            trace,
            transfer=transfer_model(100.0),
        ).transfer_s[0]
        for send in ("whole", "chunks", "layers")
    }
    assert waits_s["whole"] == pytest.approx(whole_s)
    assert waits_s["chunks"] == pytest.approx(whole_s / 4)
    assert waits_s["layers"] == pytest.approx(whole_s / 4 / KV.num_layers)
    slow = Setup(kind="pd", num_decode=1, send="layers")
    waited_s = run(slow, trace, transfer=transfer_model(gb_per_s=1.0)).transfer_s[0]
    prefill_s = run(AGGREGATED, trace).ttft_s[0]
    assert waited_s == pytest.approx(100 * whole_s - prefill_s)


def test_first_tokens_may_come_together() -> None:
    trace = closed_loop(isl=1000, osl=5, concurrency=1, num_requests=2)
    apart, together = (run(AGGREGATED, trace, first_tokens_together=on) for on in (False, True))
    assert together.ttft_s == pytest.approx(apart.ttft_s + DECODE_S)
    assert (together.first_gap_s == 0.0).all()
    assert together.e2el_s == pytest.approx(apart.e2el_s)
    assert together.gaps_of(0).tolist() == pytest.approx([0.0, *[DECODE_S] * 3])
    assert together.gaps.share_above(0.0) == pytest.approx(0.75)


def test_jitter_spreads_gaps_and_keeps_their_mean() -> None:
    trace = closed_loop(isl=1000, osl=200, concurrency=1, num_requests=2)
    spread = run(AGGREGATED, trace, step_model(jitter=[0.8, 1.0, 1.2])).gaps
    assert spread.num_samples == 2 * 199
    assert spread.values_s @ spread.counts / spread.num_samples == pytest.approx(DECODE_S)
    found = [spread.percentile_s(percent) for percent in (10, 50, 90)]
    assert found == pytest.approx([0.8 * DECODE_S, DECODE_S, 1.2 * DECODE_S])


@pytest.mark.parametrize(("concurrency", "factor"), [(1, 1.1), (2, 3.0)])
def test_a_request_that_decodes_alone_has_its_own_jitter(concurrency: int, factor: float) -> None:
    trace = closed_loop(isl=1000, osl=200, concurrency=concurrency, num_requests=2)
    found = run(AGGREGATED, trace, step_model(jitter=[0.5, 3.0], jitter_alone=[0.9, 1.1]))
    longest = found.gaps.percentile_s(99) / found.gaps.percentile_s(1)
    assert longest == pytest.approx(factor / (0.9 if concurrency == 1 else 0.5), rel=0.2)
    drawn_s = found.gaps_of(1)[-50:]
    assert drawn_s.max() / drawn_s.min() == pytest.approx(longest, rel=0.2)


def test_what_goes_beyond_the_measurements_is_said() -> None:
    narrow = step_model(
        measured=MeasuredRange(num_decoding=4, num_context_tokens=2000, num_prompt_tokens=300)
    )
    inside = closed_loop(isl=300, osl=5, concurrency=4)
    outside = closed_loop(isl=301, osl=5, concurrency=8)
    assert run(AGGREGATED, inside, narrow).extrapolated == ()
    texts = " | ".join(run(AGGREGATED, outside, narrow).extrapolated)
    for part in ("TP 1: 8 sequences", "tokens of context", "301 tokens of a prompt"):
        assert part in texts


def test_transfers_beyond_the_sweep_are_said_or_refused() -> None:
    small = closed_loop(isl=16, osl=2, concurrency=1)
    huge = closed_loop(isl=60_000, osl=2, concurrency=1, num_requests=1)
    crowded = Setup(kind="pd", num_prefill=4, num_decode=1)
    at_once = closed_loop(isl=8000, osl=2, concurrency=4)
    assert run(PD, small, transfer=transfer_model()).extrapolated == ()
    (text,) = run(PD, huge, transfer=transfer_model()).extrapolated
    assert text == "1 of 1 transfers (7.86 to 7.86 GB) lie outside the 0.00105 to 4.29 GB measured"
    (text,) = run(crowded, at_once, transfer=transfer_model()).extrapolated
    assert text == "up to 4 transfers shared a link; so many at once were not measured"
    known = transfer_model(contention=((4, 1.2),), strict=True)
    assert run(crowded, at_once, transfer=known).extrapolated == ()
    with pytest.raises(InvalidUsage, match="outside the measured transfers"):
        run(PD, huge, transfer=transfer_model(strict=True))


def test_last_parts_below_the_sweep_take_its_least_time() -> None:
    by_layers = Setup(kind="pd", num_prefill=1, num_decode=1, send="layers")
    small = closed_loop(isl=16, osl=2, concurrency=1, num_requests=1)  # 2 MiB, a layer 64 KiB
    found = run(by_layers, small, transfer=transfer_model(strict=True))
    assert found.extrapolated == ()
    assert found.transfer_s[0] == pytest.approx((1 << 20) / 100e9)


def test_last_parts_above_the_sweep_are_said_or_refused() -> None:
    by_chunks = Setup(kind="pd", num_prefill=1, num_decode=1, send="chunks")
    huge = closed_loop(isl=131072, osl=2, concurrency=1, num_requests=1)
    found = run(by_chunks, huge, transfer=transfer_model())
    assert any("transfers and last parts" in text for text in found.extrapolated)
    with pytest.raises(InvalidUsage, match="outside the measured transfers"):
        run(by_chunks, huge, transfer=transfer_model(strict=True))


def test_a_tp_size_without_figures_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="TP 2, only for 1"):
        run(Setup(kind="aggregated", prefill_tp=2), closed_loop(isl=1, osl=1, concurrency=1))


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "pd"},
        {"kind": "aggregated", "num_decode": 1},
        {"kind": "aggregated", "token_budget": 100, "max_num_seqs": 101},
        {"kind": "aggregated", "strategy": Strategy(num_long_engines=1)},
    ],
)
def test_a_set_up_that_is_none_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsage):
        Setup(**fields)


def test_set_ups_count_their_gpus() -> None:
    long = Strategy(num_long_engines=1)
    setup = Setup(kind="aggregated", num_prefill=3, prefill_tp=2, long_tp=4, strategy=long)
    assert (setup.num_gpus, setup.label) == (8, "2 x TP2 + 1 x TP4 long")
    assert Setup(kind="pd", num_prefill=1, prefill_tp=2, num_decode=3).num_gpus == 5
