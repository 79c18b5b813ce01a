"""Whether what ``--model``, ``--engine`` and records name is one model."""

import logging
from collections.abc import Container, Sequence
from typing import Final

from kvxfer.errors import InvalidUsage
from kvxfer.layout.models import CATALOGUE
from kvxfer.pd.planner.profile_records import Measured
from kvxfer.pd.planner.same_model import Model, relation

_log: Final = logging.getLogger(__name__)


def require_steps_of(engine_model: str, kv: Model, option: str = "--engine") -> None:
    """Refuse steps of another model than that of ``--model``; warn where that is not known.

    Raises:
        InvalidUsage: their shapes are known and differ.
    """
    steps = Model.named(engine_model)
    found = relation(steps, kv)
    if found == "other":
        raise InvalidUsage(
            f"the engine's figures are of {steps}, and --model is {kv}: two models; give "
            f"{_option(steps)}, or {option} with figures of {kv.name} "
            "(`kvxfer pd profile` measures them)"
        )
    if found == "unknown":
        _log.warning("steps are of %s, KV of %s: not known to be one model", steps.name, kv.name)


def require_records_of(
    points: Sequence[Measured], model: str, option: str, only: Container[str] | None = None
) -> None:
    """Refuse records of another model than ``option`` gives; warn where that is not known.

    Args:
        points: the records; servers that ran already are left out.
        model: what ``option`` names.
        only: labels of the points that matter; None: all.

    Raises:
        InvalidUsage: their shapes are known and differ.
    """
    wanted = Model.named(model)
    taken = [one for one in points if only is None or one.label in only]
    for name in sorted({one.setup.model for one in taken if one.setup.kind != "external"}):
        measured = Model.named(name)
        found = relation(measured, wanted)
        if found == "other":
            raise InvalidUsage(
                f"the records are of {measured}, and {option} is of {wanted}: two models; give "
                f"records of {wanted.name}, or {option} of {measured.name}"
            )
        if found == "unknown":
            _log.warning(
                "records are of %s, %s of %s: not known to be one model", name, option, model
            )


def _option(model: Model) -> str:
    """The ``--model`` that names a known shape; only the catalogue's have a name there."""
    name = "" if model.shape is None else model.shape.name
    return f"--model {name}" if name in CATALOGUE else f"--model with {model.name}'s config.json"
