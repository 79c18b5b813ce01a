"""Service level objectives: what is read, and which requests are good."""

import numpy as np
import pytest

from kvxfer.errors import InvalidUsage
from kvxfer.pd.analysis.replies import Replies, Reply
from kvxfer.pd.analysis.slo import judge, parse_objectives

GAPS_MS = [20.0, *[10.0] * 98, 60.0]


def reply(ttft_ms: float = 100.0, gaps_ms: list[float] | None = None) -> Reply:
    gaps = np.array(GAPS_MS if gaps_ms is None else gaps_ms)
    return Reply(0, ttft_ms, ttft_ms + float(gaps.sum()), len(gaps) + 1, gaps)


def is_good(text: str, one: Reply) -> bool:
    found = judge(Replies([one], [], False), parse_objectives(text), 2.0)
    assert found.requests_per_s == found.num_good / 2.0
    return found.num_good == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ttft", 100.0),
        ("first_gap", 20.0),
        ("itl", 60.0),
        ("itl:max", 60.0),
        ("itl:p100", 60.0),
        ("itl:p50", 10.0),
        ("itl:p99", 20.4),  # rank 98.01 of 0 to 99: between 20 and 60
        ("itl:mean", sum(GAPS_MS) / len(GAPS_MS)),
        ("tpot", sum(GAPS_MS) / len(GAPS_MS)),
        ("e2el", 100.0 + sum(GAPS_MS)),
    ],
)
def test_a_limit_is_met_by_equality_and_by_no_more(key: str, value: float) -> None:
    exact = repr(float(np.percentile(GAPS_MS, 99))) if key == "itl:p99" else repr(value)
    assert float(exact) == pytest.approx(value)
    assert is_good(f"{key}:{exact}", reply())
    assert not is_good(f"{key}:{value * (1 - 1e-6)!r}", reply())


def test_all_objectives_have_to_be_met() -> None:
    assert is_good("ttft:200,itl:p99:30", reply())
    assert not is_good("ttft:50,itl:p99:30", reply())
    assert not is_good("ttft:200,itl:30", reply())


def test_a_reply_of_one_token_is_judged_on_its_ttft() -> None:
    assert is_good("ttft:200,first_gap:1,itl:1,itl:mean:1,tpot:1", reply(gaps_ms=[]))
    assert not is_good("ttft:99,itl:1", reply(gaps_ms=[]))


def test_what_failed_is_not_good() -> None:
    found = judge(Replies([reply()], [1, 2, 3], False), parse_objectives("ttft:200"), 0.5)
    assert (found.num_good, found.num_sent, found.attained, found.requests_per_s) == (1, 4, 0.25, 2)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "names nothing"),
        (",", "names nothing"),
        ("ttft", "cannot read"),
        ("latency:5", "'latency' is not known; use ttft, first_gap, itl, tpot, e2el"),
        ("TTFT:5", "'TTFT' is not known"),
        ("ttft:p99:5", "cannot read"),
        ("itl:p99:5:6", "cannot read"),
        ("ttft:fast", "'fast' is not a limit"),
        ("ttft:0", "'0' is not a limit"),
        ("ttft:-1", "'-1' is not a limit"),
        ("ttft:nan", "'nan' is not a limit"),
        ("ttft:inf", "'inf' is not a limit"),
        ("ttft:1_000", "'1_000' is not a limit"),
        ("ttft:５００", "'５００' is not a limit"),
        ("itl:p101:5", "'p101' is not"),
        ("itl:median:5", "'median' is not"),
        ("ttft:5,ttft:6", "twice"),
        ("itl:5,itl:p100:6", "twice"),
    ],
)
def test_what_is_no_objective_is_refused(text: str, named: str) -> None:
    with pytest.raises(InvalidUsage, match=named):
        parse_objectives(text)


def test_objectives_say_what_they_are() -> None:
    texts = [str(one) for one in parse_objectives("ttft:200, itl:50, itl:p99.5:30, itl:mean:9")]
    assert texts == [
        "TTFT <= 200 ms",
        "a request's ITL max <= 50 ms",
        "a request's ITL P99.5 <= 30 ms",
        "a request's ITL mean <= 9 ms",
    ]


@pytest.mark.parametrize("text", ["itl:1000", "first_gap:1000", "itl:mean:1000"])
def test_what_was_not_measured_was_not_met(text: str) -> None:
    in_one_message = Reply(0, 100.0, 100.0, 6, np.empty(0))
    assert not is_good(text, in_one_message)
    assert is_good("ttft:100,tpot:0.1", in_one_message)
