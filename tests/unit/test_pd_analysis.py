"""Figures of PD benchmarks against a brute force over the streams themselves, token by token."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from pd_runs import Bench, Engines, Stream

from kvxfer.errors import InvalidUsage
from kvxfer.pd.analysis import analyse, parse_objectives
from kvxfer.pd.analysis.compare import crossing_percent
from kvxfer.pd.analysis.stalls import expected_share
from kvxfer.pd.summary import Distribution, Load, PointSummary, RunSummary, SetupSummary

PERCENTS = (0, 1, 50, 90, 99, 99.5, 99.9, 100)
LOAD = Load(8192, 128)


def percentile(values: list[float], percent: float) -> float:
    """By hand: the value at rank (n - 1) * p, linear between its neighbours."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    return low + (high - low) * (rank - math.floor(rank))


def gaps_ms(stream: Stream) -> list[float]:
    return [(after - before) * 1e3 for before, after in pairwise(stream.tokens_s)]


def figures(streams: list[Stream]) -> dict[str, list[float]]:
    gaps = [gaps_ms(one) for one in streams]
    return {
        "ttft": [(one.tokens_s[0] - one.start_s) * 1e3 for one in streams],
        "first_gap": [one[0] for one in gaps if one],
        "later_gaps": [gap for one in gaps for gap in one[1:]],
        "itl": [gap for one in gaps for gap in one],
        "tpot": [sum(one) / len(one) for one in gaps if one],
        "e2el": [(one.tokens_s[-1] - one.start_s) * 1e3 for one in streams],
    }


def setup_of(run: RunSummary, name: str) -> SetupSummary:
    return next(one for one in run.setups if one.setup.name == name)


def only_point(run: RunSummary) -> PointSummary:
    ((point,),) = ([one.points for one in run.setups],)
    return point[0]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", ["aggregated", "pd"])
def test_every_percentile_is_the_brute_forces(kind: str, chat: bool, tmp_path: Path) -> None:
    engines = Engines(kind=kind, jitter=0.4, seed=7)
    bench = Bench(tmp_path)
    bench.setup("one", engines)
    bench.point("one", engines, 6, chat=chat)
    point = only_point(analyse(tmp_path))
    streams = engines.simulate(6, 60, LOAD.isl, LOAD.osl)
    for name, values in figures(streams).items():
        found: Distribution = getattr(point, name)
        assert len(found) == len(values), name
        for percent in PERCENTS:
            wanted = percentile(values, percent)
            assert found.percentile(percent) == pytest.approx(wanted, rel=1e-6, abs=1e-6), name
    duration_s = streams[-1].tokens_s[-1] + 1e-3
    assert point.duration_s == pytest.approx(duration_s)
    assert point.requests_per_s == pytest.approx(60 / duration_s)
    assert point.output_tokens_per_s == pytest.approx(60 * LOAD.osl / duration_s)


def test_a_share_counts_what_is_above() -> None:
    found = Distribution.of(np.array([3.0, 1.0, 2.0, 2.0]))
    assert [found.share_above(limit) for limit in (0, 1, 2, 2.5, 3)] == [1, 0.75, 0.25, 0.25, 0]
    assert found.resolves(75)
    assert not found.resolves(76)
    empty = Distribution.of(np.array([]))
    assert math.isnan(empty.percentile(50))
    assert math.isnan(empty.share_above(1))


@pytest.mark.parametrize("concurrency", [1, 2, 4, 8, 16])
def test_the_closed_form_is_what_an_aggregated_engine_does(
    concurrency: int, tmp_path: Path
) -> None:
    for name, engines in (
        ("agg", Engines()),
        ("small", Engines(token_budget=2048)),
        ("pd", Engines(kind="pd", token_budget=2048)),
    ):
        Bench(tmp_path).all(name, engines, [concurrency], num_prompts=30 * concurrency)
    run = analyse(tmp_path)
    for name, chunks in (("agg", 1), ("small", 4)):
        point = setup_of(run, name).at(LOAD, concurrency)
        assert point is not None
        assert point.stalls is not None
        wanted = (concurrency - 1) * chunks / (LOAD.osl - 1)
        assert point.stalls.expected_share == pytest.approx(wanted)
        # Fewer at both ends of a run, where not all requests are in flight.
        assert 0.85 * wanted <= point.stalls.share <= wanted
    pd = setup_of(run, "pd").points[0].stalls
    assert pd is not None
    assert (pd.share, pd.expected_share) == (0.0, None)


def test_a_reported_crossover_is_reproduced_by_the_closed_form() -> None:
    """8k in, 1k out, a budget of 8,192: P99 sees the stall from 16 requests on, not at 8."""
    shares = [
        expected_share(concurrency=c, isl=8192, osl=1024, token_budget=8192) for c in (8, 16, 32)
    ]
    assert shares[0] < 0.01 < shares[1] < shares[2]
    assert expected_share(concurrency=4, isl=8192, osl=1024, token_budget=2048) > 0.01
    assert expected_share(concurrency=2, isl=8193, osl=5, token_budget=8192) == 2 / 4
    assert expected_share(concurrency=100, isl=8192, osl=2, token_budget=16) == 1.0
    assert expected_share(concurrency=100, isl=8192, osl=1, token_budget=16) == 0.0


def test_a_budget_that_the_record_lacks_may_be_told(tmp_path: Path) -> None:
    bench, engines = Bench(tmp_path), Engines()
    bench.setup("one", engines, token_budget=None)
    bench.point("one", engines, 4)
    untold, told = (only_point(analyse(tmp_path, token_budget=n)).stalls for n in (None, 4096))
    assert untold is not None
    assert told is not None
    assert (untold.expected_share, told.expected_share) == (None, pytest.approx(3 * 2 / 127))


@pytest.mark.parametrize("first_token_from", ["decode", "prefill"])
def test_a_hand_over_is_found_wherever_it_hides(first_token_from: str, tmp_path: Path) -> None:
    """The transfer takes 30 ms, and the step that follows it 5; the median gap is a step too."""
    bench = Bench(tmp_path)
    pd = Engines(kind="pd", transfer_s=30e-3, jitter=0.0, first_token_from=first_token_from)
    bench.all("pd", pd, [1, 4])
    bench.all("alone", Engines(kind="prefill_only", jitter=0.0), [1], osl=1)
    points = setup_of(analyse(tmp_path), "pd").points
    assert [point.handover is not None for point in points] == [True, False]
    handover = points[0].handover
    assert handover is not None
    in_ttft, in_gap = (35.0, 0.0) if first_token_from == "decode" else (0.0, 30.0)
    for percent in (0, 50, 100):
        assert handover.prefill_ms.percentile(percent) == pytest.approx(in_ttft, abs=1e-6)
        assert handover.gap_ms.percentile(percent) == pytest.approx(in_gap, abs=1e-6)
        assert handover.total.percentile(percent) == pytest.approx(in_ttft + in_gap, abs=1e-6)


@pytest.mark.parametrize(
    "other", [{"model": "another"}, {"prefill_tp": 2}, {"isl": 4096}, {"kind": "aggregated"}]
)
def test_another_engine_is_no_baseline_of_a_hand_over(
    other: dict[str, object], tmp_path: Path
) -> None:
    bench = Bench(tmp_path)
    bench.all("pd", Engines(kind="pd"), [1])
    isl = int(str(other.pop("isl", LOAD.isl)))
    alone = Engines(kind=str(other.pop("kind", "prefill_only")))
    bench.setup("alone", alone, **other)
    bench.point("alone", alone, 1, isl=isl, osl=1)
    assert setup_of(analyse(tmp_path), "pd").points[0].handover is None


def test_setups_are_ranked_and_even_ones_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.all("agg", Engines(step_s=4e-3), [1, 16])
    bench.all("pd", Engines(kind="pd", step_s=5e-3), [1, 16])
    bench.all("same", Engines(kind="pd", step_s=5.1e-3, seed=1), [1, 16])
    run = analyse(tmp_path, objectives=parse_objectives("itl:30"))
    by_name = {(one.metric, one.concurrency): one for one in run.contests}
    assert by_name["ITL P99", 1].leaders == ("agg",)
    assert by_name["ITL P99", 16].leaders == ("pd", "same")
    assert by_name["goodput", 16].leaders == ("pd", "same")
    for one in run.contests:
        values = [value for _, value in one.ranking]
        assert values == sorted(values, reverse=one.unit == "req/s"), one.metric
    (crossing,) = run.crossings
    assert (crossing.below, crossing.above, crossing.concurrency) == ("agg", "pd", 16)
    stalled = setup_of(run, "agg").at(LOAD, 16)
    assert stalled is not None
    assert stalled.stalls is not None
    assert crossing.percent == pytest.approx(100 * (1 - stalled.stalls.share), abs=0.2)


def test_the_last_crossing_is_found_and_no_other() -> None:
    flat = Distribution.of(np.full(10_000, 10.0))
    steep = Distribution.of(np.concatenate([np.full(9_700, 5.0), np.full(300, 100.0)]))
    assert crossing_percent(flat, steep) == (pytest.approx(97.1, abs=0.15), True)
    assert crossing_percent(steep, flat) == (pytest.approx(97.1, abs=0.15), False)
    lower = Distribution.of(np.full(10_000, 4.0))
    even = Distribution.of(np.concatenate([np.full(9_000, 9.8), np.full(1_000, 10.2)]))
    few = Distribution.of(np.array([5.0]))
    assert [crossing_percent(flat, other) for other in (lower, even, few)] == [None] * 3


def test_a_broken_point_spoils_no_other_and_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.all("one", Engines(), [1, 2, 4])
    (tmp_path / "one" / "c2-i8192-o128.json").write_text("{}")
    (tmp_path / "one" / "c4-i8192-o128.point.json").unlink()
    run = analyse(tmp_path)
    assert [point.concurrency for point in run.setups[0].points] == [1]
    broken, cut_off = sorted(run.findings(), key=lambda found: not found[1].serious)
    assert broken[1].serious
    assert "c2-i8192-o128.json" in broken[1].text
    assert not cut_off[1].serious
    assert "c4-i8192-o128.json was cut off" in cut_off[1].text
    assert run.failed


def test_a_run_without_a_whole_point_is_refused(tmp_path: Path) -> None:
    Bench(tmp_path).setup("one", Engines())
    with pytest.raises(InvalidUsage, match="no whole point"):
        analyse(tmp_path)
