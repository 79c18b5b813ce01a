"""Pages of metrics and their histograms: what may stand in them, and what is refused."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.errors import ProtocolMismatch
from kvxfer.pd.advise import page as page_module
from kvxfer.pd.advise.buckets import buckets_between, buckets_of
from kvxfer.pd.advise.page import parse_page
from kvxfer.pd.proxy.metrics import Metrics
from kvxfer.pd.proxy.prometheus import Counter, Histogram, exposition


def test_samples_are_read_as_prometheus_writes_them() -> None:
    page = parse_page(
        "# HELP a_total A.\n# TYPE a_total counter\n\n"
        'a_total{x="one",y="q\\"{},=\\\\\\n"} 3\n'
        'a_total{x="two",} 4.5e1 1700000000000\n'
        "  b NaN\n"
        "c +Inf\n"
        'd{le="+Inf"} 1.0\n'
    )
    assert page.total("a_total") == 48
    assert page.total("a_total", x="one") == 3
    assert [labels["y"] for labels, _ in page.of("a_total", x="one")] == ['q"{},=\\\n']
    assert math.isnan(page.total("b"))
    assert page.total("c") == math.inf
    assert page.total("nothing") == 0
    assert not page.has("nothing")


@pytest.mark.parametrize(
    "text",
    ["<html>", "a", "a x", 'a{x="1} 1', "a{x=1} 1", 'a{x="1" y="2"} 1', "1a 1", "a 1 2 3"],
)
def test_what_is_no_sample_is_refused(text: str) -> None:
    with pytest.raises(ProtocolMismatch, match=r"line 2 .* is no sample"):
        parse_page(f"b 1\n{text}\n")


def test_a_page_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "MAX_SAMPLES", 3)
    parse_page("".join(f"a{i} 1\n" for i in range(3)))
    with pytest.raises(ProtocolMismatch, match="more than 3 samples"):
        parse_page("".join(f"a{i} 1\n" for i in range(4)))
    monkeypatch.setattr(page_module, "MAX_PAGE_BYTES", 10)
    with pytest.raises(ProtocolMismatch, match="above 10 bytes"):
        parse_page("#" * 11)


@pytest.mark.parametrize(
    ("earlier", "later", "restarted"),
    [
        ("a_total 3", "a_total 3", False),
        ("a_total 3", "a_total 4\nb_total 1", False),
        ("a 3", "a 1", False),
        ("a_sum 3", "a_sum 1", False),
        ("a_total 3", "a_total 2", True),
        ("a_total 3", "b_total 9", True),
        ('a_total{e="0"} 3\na_total{e="1"} 3', 'a_total{e="0"} 9\na_total{e="1"} 0', True),
        ("process_start_time_seconds 1790000000", "process_start_time_seconds 1790000000.5", False),
        ("process_start_time_seconds 1790000000", "process_start_time_seconds 1790000009", True),
    ],
)
def test_a_restart_is_seen(earlier: str, later: str, restarted: bool) -> None:
    assert parse_page(later).restarted_since(parse_page(earlier)) is restarted


def test_large_counts_keep_their_digits() -> None:
    """Readers subtract them; six digits would swallow what came between."""
    counter = Counter("a_total", "Of a.")
    counter.add(by=123_456_789)
    assert parse_page(exposition([counter])).total("a_total") == 123_456_789
    start_s = parse_page(Metrics([]).page()).total("process_start_time_seconds")
    assert start_s > 1.6e9
    assert start_s % 1e4 != 0


@given(
    values=st.lists(st.floats(1e-4, 50.0), min_size=1, max_size=60),
    percent=st.floats(0.0, 100.0),
)
@example(values=[0.0078125], percent=0.0)
def test_a_percentile_lies_between_its_bounds(values: list[float], percent: float) -> None:
    bounds = (0.001, 0.01, 0.1, 1.0, 10.0)
    histogram = Histogram("h", "H.", bounds)
    for value in values:
        histogram.observe(value)
    buckets = buckets_of(parse_page(exposition([histogram])), "h")
    assert buckets is not None
    assert buckets.count == len(values)
    assert buckets.mean == pytest.approx(sum(values) / len(values))
    found = buckets.percentile(percent)
    exact = float(np.percentile(values, percent, method="inverted_cdf"))
    assert found.low < exact <= found.high
    assert found.low <= found.estimate <= found.high
    edges = [0.0, *bounds, math.inf]
    assert (found.low, found.high) in list(pairwise(edges))


def test_a_difference_holds_what_came_between() -> None:
    histogram = Histogram("h", "H.", (1.0, 2.0))
    for _ in range(100):
        histogram.observe(0.5)
    earlier = parse_page(exposition([histogram]))
    for _ in range(10):
        histogram.observe(1.5)
    later = parse_page(exposition([histogram]))
    found = buckets_between(earlier, later, "h")
    assert found is not None
    assert found.counts == (0, 10, 0)
    assert found.mean == pytest.approx(1.5)
    assert buckets_between(later, later, "h").count == 0  # type: ignore[union-attr]
    assert buckets_between(earlier, later, "other") is None
    assert buckets_between(parse_page(""), later, "h") == buckets_of(later, "h")


@pytest.mark.parametrize(
    "text",
    [
        'h_bucket{le="1"} 5\nh_bucket{le="+Inf"} 4',
        'h_bucket{le="1"} 5',
        'h_bucket{le="soon"} 5',
        "h_bucket 5",
        'h_bucket{le="1"} NaN\nh_bucket{le="+Inf"} 4',
        'h_bucket{le="1"} 4\nh_bucket{le="+Inf"} +Inf',
        'h_bucket{le="NaN"} 4\nh_bucket{le="+Inf"} 4',
        'h_bucket{le="1"} 4\nh_bucket{le="+Inf"} 4\nh_sum NaN',
    ],
)
def test_buckets_that_contradict_themselves_are_refused(text: str) -> None:
    with pytest.raises(ProtocolMismatch, match=r"^h: "):
        buckets_of(parse_page(text), "h")


def test_bounds_that_change_are_refused() -> None:
    one, two = (
        parse_page(f'h_bucket{{le="{bound}"}} 1\nh_bucket{{le="+Inf"}} 1') for bound in (1, 2)
    )
    with pytest.raises(ProtocolMismatch, match="bounds changed"):
        buckets_between(one, two, "h")
