"""Rows of ranks: every byte on every rank is checked, and planted faults are found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from rank_teams import (
    HOST,
    MODEL,
    NUM_TOKENS,
    Change,
    FaultyAgent,
    FaultyLimitAgent,
    case_of,
    copies_nothing,
    leaves_the_last_bytes_out,
    rig_of,
    shifts_one_token,
    swaps_heads,
    swaps_two_blocks,
    swaps_two_planes,
    team_of,
    writes_a_block_too_many,
)

from kvxfer.errors import ControlTimeout, LayoutMismatch, VerificationError
from kvxfer.sweep import messages
from kvxfer.sweep.ranks.agent import RankAgent
from kvxfer.sweep.ranks.cases import RankCase
from kvxfer.sweep.ranks.measure import RankMeasurement
from kvxfer.sweep.ranks.rig import RankRig
from kvxfer.sweep.result import SweepResult
from kvxfer.transport import Tuning

ITERS = 2
HND = replace(MODEL, order="hnd", kv="head_packed", block_size=8)
CHUNKED = replace(MODEL, kv="chunked", block_size=16)
FP8 = replace(MODEL, dtype="fp8", order="hnd")
MLA = replace(MODEL, kv="mla", num_kv_heads=1)


def measure(
    case: RankCase,
    faulty: dict[int, RankAgent] | None = None,
    *,
    on_round: Callable[[], None] = lambda: None,
) -> SweepResult:
    size = len(case.src.ranks) + len(case.dst.ranks)
    with team_of(size, faulty) as team, rig_of(case, team) as rig:
        return measurement(case, rig, on_round).run()


def measurement(
    case: RankCase, rig: RankRig, on_round: Callable[[], None] = lambda: None
) -> RankMeasurement:
    return RankMeasurement(
        case, rig, tuning=Tuning(), num_threads=1, iters=ITERS, warmup=1, seed=5, on_round=on_round
    )


@pytest.mark.parametrize("op", ["put", "get"])
@pytest.mark.parametrize(
    "shape",
    [
        {"tp": (1, 1)},
        {"tp": (2, 1)},
        {"tp": (1, 2)},
        {"tp": (4, 3)},
        {"tp": (3, 4)},
        {"tp": (8, 2)},  # more ranks than heads
        {"tp": (2, 8)},
        {"tp": (1, 2), "pp": (2, 1)},
        {"tp": (2, 1), "dst": HND},
        {"tp": (1, 2), "src": HND, "dst": CHUNKED},
        {"tp": (2, 4), "src": CHUNKED},
        {"tp": (2, 1), "dst": FP8},
        {"tp": (1, 2), "src": HND, "dst": FP8},
        {"tp": (2, 2), "src": MLA, "dst": MLA},
    ],
    ids=str,
)
def test_a_healthy_row_passes(shape: dict[str, Any], op: str) -> None:
    case = case_of(op=op, **shape)
    rounds: list[None] = []
    result = measure(case, on_round=lambda: rounds.append(None))
    assert result.verified
    assert result.iters == ITERS
    assert len(rounds) in (ITERS, 2 * ITERS)  # twice where the limit was beaten
    assert (result.src_tp, result.dst_tp) == shape["tp"]
    assert (result.src_pp, result.dst_pp) == shape.get("pp", (1, 1))
    assert result.convert == ("bfloat16 to fp8_e4m3" if case.dst.layout is FP8 else "")


def test_the_figures_belong_together() -> None:
    result = measure(case_of((2, 1)))
    # Two of four heads side by side, K and V of 4 layers, 10 tokens; two ranks.
    assert result.run_bytes == 2 * 16 * 2
    assert result.num_runs == 2 * 4 * 2 * NUM_TOKENS
    assert result.total_bytes == result.run_bytes * result.num_runs
    assert result.num_pages == 2 * 4 * 2 * 3
    assert result.page_bytes == result.total_bytes // result.num_pages
    typical = result.total_bytes / result.latency_us.p50 / 1e3
    assert result.gb_per_s.min * (1 - 1e-9) <= typical <= result.gb_per_s.max * (1 + 1e-9)
    assert result.rank_spread is not None
    assert result.rank_spread >= 1
    assert 0 < result.post_us.p50 <= result.latency_us.p99
    assert (result.src_layout, result.dst_layout) == ("nhd split 4", "nhd split 4")
    assert result.num_kv_heads == 4


def test_a_replica_counts_as_often_as_it_is_held() -> None:
    alone, replicated = case_of((1, 1)), case_of((1, 8))
    assert replicated.total_bytes == 2 * alone.total_bytes


# Faults of one rank among several. Copies of the source ranks 0 and 1, of a request to rank 2.

REQUEST = r"destination rank 0 of 1: the request: \d+ of \d+ 8-byte words are wrong"
FAULTS: dict[str, Change] = {
    "nothing": copies_nothing,
    "blocks": swaps_two_blocks,
    "planes": swaps_two_planes,
    "a token": shifts_one_token,
    "bytes": leaves_the_last_bytes_out,
    "heads": swaps_heads(2 * MODEL.vector_bytes),
}


@pytest.mark.parametrize("start", [0, ITERS + 1])  # the proof; the last round
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_is_found(fault: str, start: int) -> None:
    with pytest.raises(VerificationError, match=REQUEST) as error:
        measure(case_of((2, 1)), {0: FaultyAgent(FAULTS[fault], start)})
    assert "the first in layer " in str(error.value)


def test_two_ranks_that_swap_their_heads_are_found() -> None:
    step = 2 * MODEL.vector_bytes
    faulty = {0: FaultyAgent(swaps_heads(step)), 1: FaultyAgent(swaps_heads(-step))}
    with pytest.raises(VerificationError, match=REQUEST):
        measure(case_of((2, 1)), faulty)


@pytest.mark.parametrize("fault", ["nothing", "blocks", "bytes"])
def test_a_fault_of_a_conversion_is_found(fault: str) -> None:
    with pytest.raises(VerificationError, match=r"destination rank 0 of 1: .* bytes are wrong"):
        measure(case_of((2, 1), dst=FP8), {1: FaultyAgent(FAULTS[fault])})


def test_a_reader_at_fault_is_named() -> None:
    with pytest.raises(VerificationError, match="destination rank 1 of 2: the request"):
        measure(case_of((1, 2), op="get"), {2: FaultyAgent(copies_nothing)})


@pytest.mark.parametrize("dst", [MODEL, HND])
def test_bytes_outside_the_request_are_found(dst: Any) -> None:
    case = case_of((2, 1), dst=dst)
    faulty = FaultyAgent(writes_a_block_too_many(case.dst.pool_blocks))
    with pytest.raises(VerificationError, match="slots outside the request"):
        measure(case, {1: faulty})


@pytest.mark.parametrize("change", [copies_nothing, leaves_the_last_bytes_out])
def test_a_limit_that_was_not_copied_is_found(change: Change) -> None:
    with pytest.raises(VerificationError, match="destination rank 0 of 1: the contiguous copy"):
        measure(case_of((2, 1)), {1: FaultyLimitAgent(change)})


class PlansTooLittle(RankAgent):
    def _plan_request(self, message: messages.PlanRequest) -> messages.Planned:
        return super()._plan_request(msgspec.structs.replace(message, num_tokens=NUM_TOKENS - 1))


class SendsTwice(RankAgent):
    """As if its share overlapped with that of another."""

    def _plan_request(self, message: messages.PlanRequest) -> messages.Planned:
        planned = super()._plan_request(message)
        return msgspec.structs.replace(planned, plans=planned.plans * 2)


@pytest.mark.parametrize("agent", [PlansTooLittle, SendsTwice])
def test_plans_that_do_not_move_each_byte_once_are_found(agent: type[RankAgent]) -> None:
    with pytest.raises(VerificationError, match="all ranks together plan"):
        measure(case_of((2, 1)), {1: agent()})


class HasASlowWire(RankAgent):
    def _connect(self, message: messages.Connect) -> messages.Connected:
        connected = super()._connect(message)
        return messages.Connected(
            physical_limits_gb_per_s=[1e-6] * len(connected.physical_limits_gb_per_s)
        )


def test_a_rate_above_the_physical_limit_is_refused() -> None:
    with pytest.raises(VerificationError, match=r"is above the physical limit of 0\.0 GB/s"):
        measure(case_of((2, 1)), {0: HasASlowWire(), 1: HasASlowWire()})
    # Where one rank's link states none, the sum has none.
    assert measure(case_of((2, 1)), {0: HasASlowWire()}).physical_limit_gb_per_s is None


class HearsLate(RankAgent):
    """Hears the first orders to start when it is too late."""

    late = 2

    def _start(self, message: messages.Start) -> messages.Ran:
        self.late -= 1
        if self.late >= 0:
            message = msgspec.structs.replace(message, at_ns=1)
        return super()._start(message)


class HearsAlwaysLate(HearsLate):
    late = 10**6


def test_a_start_that_came_late_is_repeated() -> None:
    agent = HearsLate()
    assert measure(case_of((2, 1)), {1: agent}).verified
    assert agent.late < 0


def test_a_start_that_always_comes_late_ends_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.sweep.ranks.rig._MAX_LEAD_NS", 20_000_000)
    with pytest.raises(ControlTimeout, match="too busy to measure"):
        measure(case_of((2, 1)), {1: HearsAlwaysLate()})


def test_the_lead_of_a_start_grows_when_late_and_shrinks_when_calm() -> None:
    with team_of(3) as team, rig_of(case_of((2, 1)), team) as rig:
        first_ns = rig._lead_ns
        for _ in range(3):
            rig._adapt_lead(late=True)
        assert rig._lead_ns == 8 * first_ns
        leads_ns = []
        for _ in range(100):
            rig._adapt_lead(late=False)
            leads_ns.append(rig._lead_ns)
        assert list(dict.fromkeys(leads_ns)) == [8 * first_ns, 4 * first_ns, 2 * first_ns, first_ns]
        rig._adapt_lead(late=True)
        rig._adapt_lead(late=False)
        assert rig._lead_ns == 2 * first_ns


def test_ranks_start_together_and_the_latency_spans_them_all() -> None:
    case = case_of((2, 1))
    seen: list[messages.Ran] = []

    class Records(RankAgent):
        def _start(self, message: messages.Start) -> messages.Ran:
            ran = super()._start(message)
            assert ran.late or ran.begin_ns >= message.at_ns
            seen.append(ran)
            return ran

    with team_of(3, {0: Records(), 1: Records()}) as team, rig_of(case, team) as rig:
        made = measurement(case, rig)
        ids = made._draw_tables()
        rig.plan_request(*ids)
        times = rig.run_request(Tuning())
    last = seen[-2:]
    span_ns = max(one.end_ns for one in last) - min(one.begin_ns for one in last)
    assert times.latency_us == span_ns / 1e3
    assert sorted(times.rank_us) == sorted((one.end_ns - one.begin_ns) / 1e3 for one in last)


# Layouts that cannot meet.


@pytest.mark.parametrize("op", ["put", "get"])
def test_layouts_that_cannot_be_joined_are_refused_by_a_named_rank(op: str) -> None:
    case = case_of((2, 1), src=FP8, dst=MODEL, op=op)
    with team_of(3) as team, pytest.raises(LayoutMismatch, match=r"rank \d of \d: .*dtype is"):
        RankRig(case, team, num_threads=1, devices=HOST)


def test_ranks_free_what_they_hold_and_serve_the_next_row() -> None:
    with team_of(4) as team:
        for case in (case_of((2, 1)), case_of((1, 3), dst=HND), case_of((2, 2), op="get")):
            with rig_of(case, team) as rig:
                assert measurement(case, rig).run().verified
            for member in team._members:
                assert member.agent._pool is None  # type: ignore[attr-defined]
                assert member.agent._group is None  # type: ignore[attr-defined]
