"""Advice as JSON: ``kvxfer.pd.advice/1``. Fields are only ever added within version 1."""

import math
from typing import Any, Final

import msgspec

from kvxfer.pd.advise.advice import Advice
from kvxfer.pd.advise.changes import Predicted
from kvxfer.pd.advise.targets import Judged

SCHEMA: Final = "kvxfer.pd.advice/1"


def advice_json(found: Advice) -> str:
    """Everything: the interval, each target, the predictions and the sentence; NaN is null."""
    seen = found.seen
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "outcome": found.outcome,
        "sentence": found.sentence,
        "kind": seen.kind,
        "connector": seen.connector,
        "interval_s": seen.seconds,
        "load": {
            "requests_per_s": seen.requests_per_s,
            "in_flight": seen.in_flight,
            "prompt_tokens": _number(seen.prompt_tokens),
            "output_tokens": _number(seen.output_tokens),
            "num_failed": seen.num_failed,
        },
        "stages": [
            {
                "role": one.role,
                "num_engines": one.num_engines,
                "num_down": one.num_down,
                "busy": one.busy,
                "in_flight": one.in_flight,
            }
            for one in seen.stages
        ],
        "targets": [_judged(one) for one in found.judged],
        "present": None if found.present is None else _predicted(found, found.present),
        "tried": [_predicted(found, one) for one in found.tried],
        "remarks": list(found.remarks),
    }
    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode() + "\n"


def _judged(one: Judged) -> dict[str, Any]:
    found = one.found_s
    return {
        "target": str(one.target),
        "verdict": one.verdict,
        "num_values": one.num_values,
        "above_ms": None if found is None else found.low * 1e3,
        "up_to_ms": None if found is None else _number(found.high * 1e3),
        "estimate_ms": None if found is None else found.estimate * 1e3,
    }


def _predicted(found: Advice, one: Predicted) -> dict[str, Any]:
    values = zip(found.judged, one.values_ms, strict=True)
    return {
        "change": one.change.what,
        "setup": one.change.setup.label,
        "token_budget": one.change.setup.token_budget,
        "num_gpus": one.change.setup.num_gpus,
        "predicted_ms": {judged.target.name: _number(value) for judged, value in values},
        "uncovered": list(one.uncovered),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
