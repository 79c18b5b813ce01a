"""The choice among set-ups, and what it says would change it."""

from dataclasses import replace

import numpy as np
import pytest

from kvxfer.pd.analysis.slo import parse_objectives
from kvxfer.pd.plan_summary import Candidate, PlannedPoint
from kvxfer.pd.planner.recommend import recommend
from kvxfer.pd.summary import Distribution, Goodput, Load, PointSummary

SLO = parse_objectives("itl:p99:30")
LOADS = ("1 in flight", "8 in flight", "32 in flight")


def candidate(
    name: str, num_gpus: int, good: list[int], *, rate: float = 1.0, needed_ms: float = 10.0
) -> Candidate:
    """Percent of good requests by load; ``rate`` is what the heaviest load has a second."""
    points = tuple(
        point(load, share, rate, needed_ms) for load, share in zip(LOADS, good, strict=False)
    )
    kind = "pd" if name.startswith("pd") else "aggregated"
    return Candidate(name, kind, num_gpus, name, points)


def point(load: str, share: int, rate: float, needed_ms: float) -> PlannedPoint:
    times = Distribution.of(np.array([10.0, needed_ms]))
    summary = PointSummary(
        load=Load(8192, 1024),
        concurrency=1,
        num_sent=100,
        num_failed=0,
        duration_s=100 / rate,
        requests_per_s=rate,
        output_tokens_per_s=1.0,
        ttft=times,
        first_gap=times,
        later_gaps=times,
        itl=times,
        tpot=times,
        e2el=times,
        goodput=Goodput(share, 100, rate * share / 100),
    )
    return PlannedPoint(load, None, summary, (), 0.5, (needed_ms,))


def test_the_cheapest_that_serves_the_heaviest_load_wins() -> None:
    found = [
        candidate("agg-1xtp8", 8, [100, 100, 95], rate=9.0),
        candidate("pd-1xtp2+1xtp2", 4, [100, 100, 92]),
        candidate("agg-1xtp4", 4, [100, 80, 10], needed_ms=153.0),
    ]
    choice = recommend(found, SLO, 0.9)
    assert choice is not None
    assert (choice.name, choice.num_gpus) == ("pd-1xtp2+1xtp2", 4)
    assert "no other set-up of 4 GPUs or fewer" in choice.reason
    assert choice.changes == (
        "Up to 1 in flight, agg-1xtp4 on 4 GPUs meets the objectives too.",
        "agg-1xtp4 on 4 GPUs would serve 32 in flight if a request's ITL P99 were allowed 153 ms.",
    )


def test_more_load_served_beats_fewer_gpus() -> None:
    found = [candidate("agg-1xtp2", 2, [100, 100, 50]), candidate("agg-1xtp4", 4, [99, 99, 99])]
    choice = recommend(found, SLO, 0.9)
    assert choice is not None
    assert choice.name == "agg-1xtp4"
    assert "Up to 8 in flight, agg-1xtp2 on 2 GPUs" in choice.changes[0]


def test_of_equals_one_pool_beats_two() -> None:
    pd = candidate("pd-1xtp1+1xtp1", 2, [100, 100, 100], rate=1.03)
    aggregated = candidate("agg-1xtp2", 2, [100, 100, 100])
    choice = recommend([pd, aggregated], SLO, 0.9)
    assert choice is not None
    assert choice.name == "agg-1xtp2"
    better = candidate("pd-1xtp1+1xtp1", 2, [100, 100, 100], rate=1.2)
    choice = recommend([better, aggregated], SLO, 0.9)
    assert choice is not None
    assert choice.name == "pd-1xtp1+1xtp1"
    assert "meets the objectives with 32 in flight too" in choice.changes[0]


def test_a_load_that_nothing_serves_is_said() -> None:
    one = candidate("agg-1xtp2", 2, [100, 95, 40], needed_ms=77.0)
    choice = recommend([one], SLO, 0.9)
    assert choice is not None
    assert "no set-up serves 32 in flight" in choice.reason
    assert choice.changes == (
        "agg-1xtp2 would serve 32 in flight if a request's ITL P99 were allowed 77 ms.",
    )


def test_where_nothing_serves_anything_the_nearest_is_named() -> None:
    found = [candidate("a", 2, [50, 0, 0], needed_ms=40.0), candidate("b", 2, [10, 0, 0])]
    choice = recommend(found, SLO, 0.9)
    assert choice is not None
    assert choice.name == "a"
    assert not choice.meets
    assert choice.reason.startswith("with 1 in flight 50% of the requests are good where 90%")
    assert choice.changes == ("a would do if a request's ITL P99 were allowed 40 ms.",)


def test_a_smaller_share_lets_a_cheaper_one_serve() -> None:
    found = [candidate("agg-1xtp2", 2, [100, 100, 80]), candidate("agg-1xtp4", 4, [100, 100, 99])]
    strict, loose = (recommend(found, SLO, share) for share in (0.9, 0.75))
    assert strict is not None
    assert loose is not None
    assert (strict.name, loose.name) == ("agg-1xtp4", "agg-1xtp2")


def test_of_equals_of_one_kind_the_one_with_more_room_wins() -> None:
    found = [
        candidate("agg-1xtp2", 2, [100, 100, 100], needed_ms=29.0),
        candidate("agg-2xtp1", 2, [100, 100, 100], needed_ms=12.0),
    ]
    choice = recommend(found, SLO, 0.9)
    assert choice is not None
    assert choice.name == "agg-2xtp1"


def test_each_objective_met_by_enough_is_not_all_met_by_enough() -> None:
    served = candidate("pd-1xtp1+1xtp1", 2, [100])
    close = candidate("agg-2xtp1", 2, [84], needed_ms=10.0)  # each alone is met by 90 %
    choice = recommend([served, close], SLO, 0.9)
    assert choice is not None
    assert "no other set-up of 2 GPUs or fewer meets the objectives" in choice.reason
    assert choice.changes == (
        "agg-2xtp1 on 2 GPUs would serve 1 in flight if each request met all of them at once.",
    )
    slower = candidate("agg-1xtp2", 2, [90], needed_ms=25.0)
    choice = recommend([served, close, slower], SLO, 0.9)
    assert choice is not None
    assert choice.changes[0].startswith("agg-1xtp2 on 2 GPUs meets the objectives with 1 in")


def test_a_share_that_is_just_reached_is_enough() -> None:
    exact = Goodput(999, 1000, 1.0)
    one = replace(point("a load", 100, 1.0, 10.0).summary, goodput=exact)
    planned = PlannedPoint("a load", None, one, (), 0.5, (10.0,))
    assert exact.attained < 99.9 / 100  # as floats are
    assert planned.meets(99.9 / 100)
    assert not planned.meets(0.9991)


@pytest.mark.parametrize(("asked", "text"), [(0.999, "99.9%"), (0.004, "0.4%"), (0.9, "90%")])
def test_shares_keep_the_figures_that_tell_them_apart(asked: float, text: str) -> None:
    none = candidate("agg-1xtp2", 2, [0])
    choice = recommend([none], SLO, asked)
    assert choice is not None
    assert f"0% of the requests are good where {text} are asked for" in choice.reason


def test_replies_of_one_token_have_no_gaps_to_tell_of() -> None:
    whole = candidate("agg-1xtp2", 2, [100])
    no_gaps = replace(whole.points[0].summary, itl=Distribution(np.empty(0)))
    one = replace(whole, points=(replace(whole.points[0], summary=no_gaps),))
    choice = recommend([one], SLO, 0.9)
    assert choice is not None
    assert choice.reason.endswith("TTFT P50 10 ms, 1 requests a second.")


def test_without_objectives_nothing_is_recommended() -> None:
    assert recommend([candidate("a", 2, [100])], (), 0.9) is None
