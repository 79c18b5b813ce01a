"""Simulated runs as the figures that measured ones have, for one set-up or for a whole plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvxfer.errors import InvalidUsage
from kvxfer.pd.analysis.replies import Replies
from kvxfer.pd.analysis.slo import Objective, judge
from kvxfer.pd.plan_summary import Candidate, Plan, PlannedPoint
from kvxfer.pd.planner.engine_model import EngineModel
from kvxfer.pd.planner.fit_check import MOST_OFF
from kvxfer.pd.planner.kv_size import KVSize
from kvxfer.pd.planner.recommend import recommend
from kvxfer.pd.planner.search import Named
from kvxfer.pd.planner.setup import Setup
from kvxfer.pd.planner.simulate import simulate
from kvxfer.pd.planner.simulated import Ints, SimulatedRun
from kvxfer.pd.planner.trace import Trace
from kvxfer.pd.planner.transfer_model import TransferModel
from kvxfer.pd.summary import Distribution, Load, PointSummary

_MOST_GAPS = 100_000  # kept of one point; its tail is thinned evenly


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What a prediction stands on: steps, bytes and transfers."""

    engine: EngineModel
    kv: KVSize
    transfer: TransferModel | None = None


def plan(
    setups: Sequence[Named],
    traces: Sequence[Trace],
    models: Models,
    *,
    objectives: Sequence[Objective] = (),
    attained: float = 0.9,
    watch: Callable[[Named, int], None] = lambda one, at: None,
) -> Plan:
    """Simulate every set-up under every load and choose one.

    Args:
        setups: what `kvxfer.pd.planner.search.candidates` found.
        traces: loads, the lightest first.
        models: the costs.
        objectives: what makes a request good; without any, nothing is recommended.
        attained: share of good requests that a set-up needs, 0 to 1. 0.9 is DistServe's (OSDI '24).
        watch: called before each set-up, with its number.

    Raises:
        InvalidUsage: a request is longer than the model takes, or no set-up can be simulated; says
            why the first cannot.
    """
    _require_context(traces, models.kv)
    found: list[Candidate] = []
    skipped: list[tuple[str, str]] = []
    for at, one in enumerate(setups):
        watch(one, at)
        try:
            points = tuple(
                predict(one.setup, trace, models, objectives, attained) for trace in traces
            )
        except InvalidUsage as error:
            skipped.append((one.name, str(error)))
            continue
        setup = one.setup
        found.append(Candidate(one.name, setup.kind, setup.num_gpus, setup.label, points))
    if not found:
        raise InvalidUsage(f"no set-up can be simulated; {skipped[0][0]}: {skipped[0][1]}")
    choice = recommend(found, objectives, attained)
    engine = models.engine
    return Plan(
        model=models.kv.model,
        engine=f"{engine.name}, {engine.model} ({engine.source}){_fit(setups, engine)}",
        transfer=None if models.transfer is None else models.transfer.source,
        loads=tuple(trace.name for trace in traces),
        objectives=tuple(map(str, objectives)),
        attained=attained,
        candidates=tuple(found),
        skipped=tuple(skipped),
        recommendation=choice,
    )


def _require_context(traces: Sequence[Trace], kv: KVSize) -> None:
    requests = [request for trace in traces for request in trace.requests]
    longest = max(requests, key=lambda one: one.num_prompt_tokens + one.num_output_tokens)
    num_tokens = longest.num_prompt_tokens + longest.num_output_tokens
    if kv.max_tokens is not None and num_tokens > kv.max_tokens:
        raise InvalidUsage(
            f"a request of {num_tokens} tokens ({longest.num_prompt_tokens} in, "
            f"{longest.num_output_tokens} out), and {kv.model} takes {kv.max_tokens}; send shorter "
            "ones, or give --model with the config.json of one that takes more"
        )


def _fit(setups: Sequence[Named], engine: EngineModel) -> str:
    """How far off the costs are that these set-ups use, where that is far."""
    used = {tp for one in setups for tp in (one.setup.prefill_tp, one.setup.decode_tp)}
    worst = max(
        (one.residual.worst for one in engine.steps if one.tp_size in used and one.residual),
        default=0.0,
    )
    return f"; the fit is up to {worst:.0%} off its own measurements" if worst > MOST_OFF else ""


def predict(
    setup: Setup,
    trace: Trace,
    models: Models,
    objectives: Sequence[Objective] = (),
    attained: float = 0.9,
) -> PlannedPoint:
    """Simulate one set-up under one load.

    Raises:
        InvalidUsage: what `kvxfer.pd.planner.simulate.simulate` refuses.
    """
    run = simulate(setup, trace, models.engine, models.kv, models.transfer)
    replies = run.replies() if objectives else None
    return PlannedPoint(
        load=trace.name,
        concurrency=trace.concurrency,
        summary=summary_of(run, trace, replies, objectives),
        extrapolated=run.extrapolated,
        busy=max(run.busy),
        needed_ms=tuple(_needed_ms(one, replies, attained) for one in objectives)
        if replies
        else (),
    )


def summary_of(
    run: SimulatedRun,
    trace: Trace,
    replies: Replies | None = None,
    objectives: Sequence[Objective] = (),
) -> PointSummary:
    """The figures of a simulated run; a trace's load is its mean, its concurrency its mean too."""
    e2el_ms = run.e2el_s * 1e3
    ttft_ms = run.ttft_s * 1e3
    many = run.num_output_tokens > 1
    goodput = None
    if replies is not None and objectives:
        goodput = judge(replies, tuple(objectives), run.duration_s)
    in_flight = max(1, round(float(run.e2el_s.sum()) / run.duration_s))
    return PointSummary(
        load=Load(_mean(run.num_prompt_tokens), _mean(run.num_output_tokens)),
        concurrency=in_flight if trace.concurrency is None else trace.concurrency,
        num_sent=len(ttft_ms),
        num_failed=0,
        duration_s=run.duration_s,
        requests_per_s=run.requests_per_s,
        output_tokens_per_s=float(run.num_output_tokens.sum()) / run.duration_s,
        ttft=Distribution.of(ttft_ms),
        first_gap=Distribution.of(run.first_gap_s[many] * 1e3),
        later_gaps=run.later_gaps.distribution(_MOST_GAPS),
        itl=run.gaps.distribution(_MOST_GAPS),
        tpot=Distribution.of((e2el_ms - ttft_ms)[many] / (run.num_output_tokens[many] - 1)),
        e2el=Distribution.of(e2el_ms),
        goodput=goodput,
    )


def _needed_ms(objective: Objective, replies: Replies, attained: float) -> float:
    """The limit of one objective that so many requests would meet, by that one alone."""
    values = [value for one in replies.completed if (value := objective.value(one)) is not None]
    if not values:
        return 0.0
    return float(np.quantile(values, attained, method="inverted_cdf"))


def _mean(counts: Ints) -> int:
    return max(1, round(float(counts.mean())))
