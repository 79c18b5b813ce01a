"""The sweep's own checks: planted faults, and figures that cannot be."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from planted_links import (
    CopiesNothing,
    FakeLoad,
    IsOneRoundStale,
    LeavesOneBlockOut,
    LeavesTheLastBytesOut,
    PlantedLink,
    RecordingLink,
    SwapsTwoBlocks,
    SwapsTwoPlanes,
    WritesOneBlockTooMany,
    is_request,
)

from kvxfer.errors import VerificationError
from kvxfer.layout import CopyPlan
from kvxfer.sweep import SweepOptions, expand_cases
from kvxfer.sweep import rig as rig_module
from kvxfer.sweep.agent import Agent
from kvxfer.sweep.cases import SweepCase
from kvxfer.sweep.measure import Measurement
from kvxfer.sweep.result import ComputeEffect, SweepResult
from kvxfer.sweep.rig import Rig, RigSpec
from kvxfer.sweep.samples import Samples, default_iters, require_possible
from kvxfer.transport import Op, Transfer, Tuning

ITERS = 3
OPTIONS = SweepOptions(
    transport="loopback", page_bytes=(4096,), total_bytes=1 << 20, memory=("private",)
)


def case_of(options: SweepOptions = OPTIONS) -> SweepCase:
    (case,) = expand_cases(options, transport="loopback")
    return case


def spec_of(case: SweepCase) -> RigSpec:
    return RigSpec(
        layout=case.layout,
        num_blocks=case.pool_blocks,
        transport="loopback",
        memory="private",
        op=case.op,
        num_threads=1,
        copy_threads=1,
        devices=(-1, -1),
    )


@pytest.fixture(params=["put", "get"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    case = case_of(replace(OPTIONS, ops=(request.param,)))
    agent = Agent()
    with Rig(spec_of(case), agent) as made:
        yield made
    agent.close()


only_put = pytest.mark.parametrize("rig", ["put"], indirect=True)


def measure(
    rig: Rig,
    link: Any = None,
    *,
    warmup: int = 0,
    on_round: Callable[[], None] = lambda: None,
    compute: tuple[str, str] | None = None,
) -> SweepResult:
    if link is not None:
        rig.peer.link = link
    case = replace(case_of(), op=rig.spec.op)
    return measurement(case, rig, warmup=warmup, on_round=on_round).run(compute)


def measurement(
    case: SweepCase,
    rig: Rig,
    *,
    warmup: int = 0,
    on_round: Callable[[], None] = lambda: None,
) -> Measurement:
    return Measurement(
        case,
        rig,
        tuning=Tuning(),
        iters=ITERS,
        warmup=warmup,
        seed=0,
        on_round=on_round,
    )


# Copies of a measurement without warm-up: the request, the limit (both proofs); then in each round
# the limit and the request.
PROOF, LIMIT_PROOF, LAST_ROUND = 0, 1, 2 + 2 * ITERS - 1


def test_a_healthy_link_passes(rig: Rig) -> None:
    rounds: list[None] = []
    result = measure(rig, warmup=2, on_round=lambda: rounds.append(None))
    assert result.verified
    assert result.iters == len(rounds) == ITERS
    assert result.op == rig.spec.op.value
    assert result.total_bytes == 1 << 20


@only_put
def test_the_numbers_of_the_copies_are_right(rig: Rig) -> None:
    link = CopiesNothing(rig, start=100)
    measure(rig, link)
    rounds = 1 if link.left == 100 - LAST_ROUND - 1 else 2  # twice where the limit was beaten
    assert link.left == 100 - 2 - rounds * 2 * ITERS


@pytest.mark.parametrize("start", [PROOF, LAST_ROUND])
@pytest.mark.parametrize(
    "fault",
    [CopiesNothing, SwapsTwoBlocks, SwapsTwoPlanes, LeavesOneBlockOut, LeavesTheLastBytesOut],
)
def test_a_fault_of_any_round_is_found(rig: Rig, fault: type[PlantedLink], start: int) -> None:
    with pytest.raises(VerificationError, match=r"the request: .* words are wrong"):
        measure(rig, fault(rig, start))


@only_put
@pytest.mark.parametrize(
    ("start", "what"), [(LIMIT_PROOF, "the contiguous copy"), (LAST_ROUND, "the request")]
)
def test_stale_data_is_found(rig: Rig, start: int, what: str) -> None:
    with pytest.raises(VerificationError, match=rf"{what}: .* words are wrong"):
        measure(rig, IsOneRoundStale(rig, start))


def test_a_block_too_many_is_found(rig: Rig) -> None:
    with pytest.raises(VerificationError, match="blocks outside the request: 32768 of") as error:
        measure(rig, WritesOneBlockTooMany(rig, PROOF))
    assert "the first in layer 0, block " in str(error.value)


@pytest.mark.parametrize("fault", [CopiesNothing, LeavesTheLastBytesOut])
def test_a_limit_that_the_request_has_already_brought_is_found(fault: type[PlantedLink]) -> None:
    """One plane and blocks in order: the request moves the very bytes of the contiguous copy."""
    options = replace(OPTIONS, page_bytes=(1 << 16,), total_bytes=1 << 16)
    case = case_of(replace(options, block_orders=("contiguous",)))
    assert case.layout.num_planes == 1
    agent = Agent()
    with Rig(spec_of(case), agent) as rig:
        rig.peer.link = fault(rig, LIMIT_PROOF)  # type: ignore[assignment]
        with pytest.raises(VerificationError, match=r"the contiguous copy: .* words are wrong"):
            measurement(case, rig).run()
    agent.close()


def test_every_timed_copy_follows_a_fill_of_what_it_reads(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = RecordingLink(rig, monkeypatch)
    measure(rig, link)
    after_proof = link.events.index("limit") + 1
    events = link.events[after_proof:]
    wakes = ["wake"] * 3
    a_round = ["fill_source_prefix", *wakes, "limit"]
    a_round += ["fill_source", "plan", *wakes, "request", "wait", "require_delivered"]
    assert events[: len(a_round) * ITERS] == a_round * ITERS


def test_a_fill_of_the_prefix_is_what_the_limit_reads(rig: Rig) -> None:
    num_bytes = 3 * rig.spec.layout.page_bytes
    rig.fill_source(1)
    rig.fill_source_prefix(2, num_bytes)
    rig.limit_copy(num_bytes + rig.spec.layout.page_bytes)
    rig.require_prefix(2, num_bytes)
    with pytest.raises(VerificationError, match="the first in page 3"):
        rig.require_prefix(2, num_bytes + rig.spec.layout.page_bytes)


def test_waking_gives_every_thread_work_and_delivers_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = RecordingLink(rig, monkeypatch)
    rig.peer.link = link  # type: ignore[assignment]
    rig.fill_source(1)
    rig.fill_destination(2)
    rig.wake()
    first = np.zeros(1, np.int64)
    for _, plan in link.copies:
        assert plan.total_bytes >= 256 * rig.spec.num_threads
    with pytest.raises(VerificationError):
        rig.require_delivered(1, rig_module.BlockTables(first, first))
    rig.require_untouched(2, rig_module.BlockTables(first, first))


@pytest.mark.parametrize("side", ["src", "dst"])
def test_beside_a_load_transfers_follow_each_other_and_nothing_else_runs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    link = RecordingLink(rig, monkeypatch)
    monkeypatch.setattr(FakeLoad, "events", link.events, raising=False)
    for module in ("measure", "agent"):
        monkeypatch.setattr(f"kvxfer.sweep.{module}.ComputeLoad", FakeLoad)
    for name in ("_COMPUTE_ALONE_S", "_COMPUTE_BESIDE_S"):
        monkeypatch.setattr(f"kvxfer.sweep.measure.{name}", 0.02)
    monkeypatch.setattr("kvxfer.sweep.samples._ABOVE_LIMIT", float("inf"))
    result = measure(rig, link, compute=("gemm", side))
    assert result.compute == ComputeEffect("gemm", side, result.compute.alone_us, 3.0)
    begin = len(link.events) - link.events[::-1].index("load")
    before, after = link.events[:begin], link.events[begin:]
    assert [event for event in before if event in ("plan", "fill_source")][-2:] == [
        "fill_source",
        "plan",
    ]
    busy = [event for event in after if event != "reset"]
    assert busy[-2:] == ["load ends", "require_delivered"]
    count = result.iters
    assert busy[:-2] == ["request", *["request", "wait"] * (count - 1), "wait"]
    # One figure, of all of them.
    assert result.gb_per_s.min == result.gb_per_s.p50 == result.gb_per_s.max
    assert result.fraction_of_limit == result.gb_per_s.p50 / result.limit_gb_per_s


def test_a_busy_rate_is_bytes_over_wall_time() -> None:
    two_queued = [20e3, 20e3, 20e3]
    samples = Samples(1 << 20, latency_us=two_queued, busy_s=0.03)
    assert samples.rates.p50 == pytest.approx(3 * (1 << 20) / 0.03 / 1e9)


@pytest.mark.parametrize("fault", [CopiesNothing, LeavesTheLastBytesOut])
def test_a_limit_that_was_not_copied_is_found(rig: Rig, fault: type[PlantedLink]) -> None:
    with pytest.raises(VerificationError, match=r"the contiguous copy: .* words are wrong"):
        measure(rig, fault(rig, LIMIT_PROOF))


@only_put
def test_a_rate_above_the_physical_limit_is_refused(rig: Rig) -> None:
    link = CopiesNothing(rig, start=10**6)
    link.physical_limit_gb_per_s = 1e-6
    with pytest.raises(VerificationError, match=r"is above the physical limit of 0\.0 GB/s"):
        measure(rig, link)


@pytest.mark.parametrize(("fastest", "contiguous"), [(451.0, 400.0), (300.0, 450.1)])
def test_either_figure_may_be_impossible(fastest: float, contiguous: float) -> None:
    with pytest.raises(VerificationError, match=r"physical limit of 450\.0 GB/s"):
        require_possible(fastest, contiguous, 450.0)
    require_possible(450.0, 450.0, 450.0)
    require_possible(fastest, contiguous, None)


class Clock:
    """In place of the time module: goes on a little with each look, and as far as it is put."""

    def __init__(self) -> None:
        self.now_ns = 0

    def perf_counter_ns(self) -> int:
        self.now_ns += 1000
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in ("measure", "rig"):
        monkeypatch.setattr(f"kvxfer.sweep.{module}.time", made)
    return made


class TakesTime(PlantedLink):
    """Takes its time for copies of the request and of the limit, by how often that was measured."""

    request_s: tuple[float, ...] = ()
    limit_s: tuple[float, ...] = ()

    def __init__(self, rig: Rig, clock: Clock) -> None:
        super().__init__(rig, 0)
        self.num_copies, self.clock = 0, clock

    def faulty(self, plan: CopyPlan, op: Op, tuning: Tuning | None) -> Transfer:
        attempt = max(self.num_copies - 2, 0) // (2 * ITERS)
        self.num_copies += 1
        taken_s = (self.request_s if is_request(plan) else self.limit_s)[attempt]
        self.clock.now_ns += int(taken_s * 1e9)
        return self.healthy(plan, op, tuning)


class BeatsTheLimit(TakesTime):
    request_s, limit_s = (0.0, 0.0), (0.05, 0.05)


class BeatsTheLimitOnce(TakesTime):
    request_s, limit_s = (0.0, 0.05), (0.05, 0.0)


class StaysBelow(TakesTime):
    request_s, limit_s = (0.05,), (0.0,)


@only_put
@pytest.mark.parametrize(
    ("link", "attempts", "has_note"),
    [(BeatsTheLimit, 2, True), (BeatsTheLimitOnce, 2, False), (StaysBelow, 1, False)],
)
def test_above_the_measured_limit_is_measured_again(
    rig: Rig, clock: Clock, link: type[TakesTime], attempts: int, has_note: bool
) -> None:
    rounds: list[None] = []
    result = measure(rig, link(rig, clock), on_round=lambda: rounds.append(None))
    assert len(rounds) == attempts * ITERS
    assert result.iters == ITERS
    assert [("measured twice" in note) for note in result.notes] == ([True] if has_note else [])
    assert (result.fraction_of_limit > 1) == has_note


@only_put
def test_measured_again_under_the_same_load(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU there is no load, so the rounds beside it are planted."""
    effects = [ComputeEffect("gemm", "src", 1.0, beside_us) for beside_us in (1.5, 1.25)]
    left = list(effects)

    def beside(self: Measurement, kind: str, side: str) -> Any:
        assert (kind, side) == ("gemm", "src")
        return self._rounds(), left.pop(0)

    monkeypatch.setattr(Measurement, "_rounds_beside", beside)
    result = measure(rig, BeatsTheLimit(rig, clock), compute=("gemm", "src"))
    assert result.compute == effects[1]
    assert result.compute.slowdown == 0.25
    assert left == []


def test_rounds_by_size() -> None:
    sizes = (0, (1 << 20) - 1, 1 << 20, (64 << 20) - 1, 64 << 20, 1 << 40)
    assert [default_iters(size) for size in sizes] == [500, 500, 100, 100, 20, 20]
