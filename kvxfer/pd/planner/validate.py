"""Predictions beside what was measured, figure by figure.

Each point of a run is simulated as it was measured: the same set-up, the same lengths in the same
order, the same number in flight, and at a rate or of a trace the same times of sending. Percentiles
of both are taken alike.
"""

from collections.abc import Container, Iterator, Sequence

import numpy as np

from kvxfer.errors import InvalidUsage
from kvxfer.pd.plan_summary import Comparison, ValidatedPoint
from kvxfer.pd.planner.predict import Models, summary_of
from kvxfer.pd.planner.profile_records import Measured
from kvxfer.pd.planner.setup import Setup
from kvxfer.pd.planner.simulate import simulate
from kvxfer.pd.planner.trace import Request, Trace
from kvxfer.pd.summary import Distribution, PointSummary

PERCENTILES = (50.0, 90.0, 99.0)
_UNKNOWN_HITS = (
    "prompts of a trace taken as computed whole: records do not say which of them begin alike"
)
_TOKEN_BUDGET = 8192  # where a record does not say


def validate(
    points: Sequence[Measured],
    models: Models,
    *,
    fitted: Container[str] = (),
) -> list[ValidatedPoint]:
    """Predict every point and compare.

    Left out are servers that were running already, whose engines are not known, and hand-overs by
    other connectors than kvxfer's, whose times no sweep of kvxfer tells.

    Args:
        points: what `kvxfer.pd.planner.profile_records.read_points` read.
        models: the costs.
        fitted: labels of the points that the engine's costs were fitted to.

    Raises:
        InvalidUsage: no point can be simulated, or a model refuses.
    """
    found = []
    for one in points:
        setup = _setup_of(one)
        if setup is not None:
            found.append(_validated(one, setup, models, one.label in fitted))
    if not found:
        raise InvalidUsage("no point of engines alone or of a PD set-up with kvxfer; measure one")
    return found


def trace_of(one: Measured) -> Trace:
    """The load of a measured point: its lengths in the order sent, at most so many in flight.

    In a closed loop the next request is sent when one ends; else each is when the client sent it.
    """
    replies = sorted(one.replies, key=lambda reply: one.sent_s[reply.index])
    sent_s = [0.0 if one.is_closed_loop else float(one.sent_s[reply.index]) for reply in replies]
    requests = tuple(
        Request(at_s - sent_s[0], one.num_prompt_tokens[reply.index], reply.num_tokens)
        for reply, at_s in zip(replies, sent_s, strict=True)
    )
    return Trace(one.point.stem, requests, concurrency=one.point.concurrency)


def _setup_of(one: Measured) -> Setup | None:
    record = one.setup
    is_pd = record.kind == "pd"
    if record.kind == "external" or (is_pd and record.connector != "kvxfer"):
        return None
    return Setup(
        kind="pd" if is_pd else "aggregated",
        num_prefill=record.num_prefill,
        num_decode=record.num_decode,
        prefill_tp=record.prefill_tp,
        decode_tp=record.decode_tp,
        token_budget=record.token_budget or _TOKEN_BUDGET,
        send="layers",
    )


def _validated(one: Measured, setup: Setup, models: Models, fitted: bool) -> ValidatedPoint:
    trace = trace_of(one)
    run = simulate(setup, trace, models.engine, models.kv, models.transfer)
    predicted = summary_of(run, trace)
    hits = (_UNKNOWN_HITS,) if one.point.trace and one.setup.reuse != "none" else ()
    return ValidatedPoint(
        setup=one.setup.name,
        load=one.point.stem,
        fitted=fitted,
        comparisons=tuple(_compare(one, predicted)),
        extrapolated=(*run.extrapolated, *hits),
    )


def _compare(one: Measured, predicted: PointSummary) -> Iterator[Comparison]:
    ttft = Distribution.of(np.array([reply.ttft_ms for reply in one.replies]))
    yield from _percentiles("TTFT", ttft, predicted.ttft)
    gaps = [reply.gaps_ms for reply in one.replies if len(reply.gaps_ms)]
    if gaps:
        yield from _percentiles("ITL", Distribution.of(np.concatenate(gaps)), predicted.itl)
        tpot = [reply.tpot_ms for reply in one.replies if reply.tpot_ms is not None]
        yield from _percentiles("TPOT", Distribution.of(np.array(tpot)), predicted.tpot)
    rate = len(one.replies) / _lasted_s(one)
    yield Comparison("requests/s", rate, predicted.requests_per_s)


def _lasted_s(one: Measured) -> float:
    """From the first sending to the last token; at a rate the client counts its first wait too."""
    if one.is_closed_loop:
        return one.duration_s
    ends_s = [one.sent_s[reply.index] + reply.e2el_ms * 1e-3 for reply in one.replies]
    return float(max(ends_s) - one.sent_s.min())


def _percentiles(
    name: str, measured: Distribution, predicted: Distribution
) -> Iterator[Comparison]:
    for percent in PERCENTILES:
        yield Comparison(
            f"{name} P{percent:g}",
            measured.percentile(percent),
            predicted.percentile(percent),
            resolved=measured.resolves(percent),
        )
