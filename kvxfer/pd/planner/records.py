"""Plans and validations as JSON: ``kvxfer.pd.plan/1`` and ``kvxfer.pd.plan-validation/1``.

Distributions are written as their percentiles, in milliseconds.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvxfer.pd.plan_summary import Candidate, Plan, PlannedPoint, ValidatedPoint
from kvxfer.pd.summary import Distribution

PLAN_SCHEMA = "kvxfer.pd.plan/1"
VALIDATION_SCHEMA = "kvxfer.pd.plan-validation/1"
_PERCENTILES = (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9, 100.0)


def plan_json(plan: Plan) -> str:
    """The whole plan, every candidate under every load."""
    choice = plan.recommendation
    record: dict[str, Any] = {
        "schema": PLAN_SCHEMA,
        "model": plan.model,
        "engine": plan.engine,
        "transfer": plan.transfer,
        "objectives": list(plan.objectives),
        "attained": plan.attained,
        "recommendation": None if choice is None else msgspec.to_builtins(choice),
        "candidates": [_candidate(one) for one in plan.candidates],
        "skipped": [{"name": name, "reason": reason} for name, reason in plan.skipped],
    }
    return _text(record)


def validation_json(points: Sequence[ValidatedPoint], facts: dict[str, Any]) -> str:
    """Measured and predicted, with the relative error of each figure.

    Args:
        facts: what else a reader has to know, such as the engine and the command.
    """
    return _text({"schema": VALIDATION_SCHEMA, **facts, "points": [_validated(p) for p in points]})


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "name": one.name,
        "kind": one.kind,
        "num_gpus": one.num_gpus,
        "description": one.description,
        "points": [_point(point) for point in one.points],
    }


def _point(point: PlannedPoint) -> dict[str, Any]:
    summary, goodput = point.summary, point.summary.goodput
    record: dict[str, Any] = {
        "load": point.load,
        "concurrency": point.concurrency,
        "num_requests": summary.num_sent,
        "duration_s": summary.duration_s,
        "requests_per_s": summary.requests_per_s,
        "output_tokens_per_s": summary.output_tokens_per_s,
        "busy": point.busy,
        "extrapolated": list(point.extrapolated),
    }
    if goodput is not None:
        record["good"] = {
            "share": goodput.attained,
            "requests_per_s": goodput.requests_per_s,
            "needed_ms": list(point.needed_ms),
        }
    for name in ("ttft", "first_gap", "later_gaps", "itl", "tpot", "e2el"):
        record[f"{name}_ms"] = _percentiles(getattr(summary, name))
    return record


def _percentiles(distribution: Distribution) -> dict[str, float]:
    if not len(distribution):
        return {}
    return {f"p{percent:g}": distribution.percentile(percent) for percent in _PERCENTILES}


def _validated(point: ValidatedPoint) -> dict[str, Any]:
    return {
        "setup": point.setup,
        "load": point.load,
        "fitted": point.fitted,
        "extrapolated": list(point.extrapolated),
        "figures": [{**msgspec.to_builtins(one), "error": one.error} for one in point.comparisons],
    }


def _text(record: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode() + "\n"
