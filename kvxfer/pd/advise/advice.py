"""From what was measured to one sentence: does the SLO hold, and what to change next.

The order: a server without requests says so; a target that is broken asks for the cheapest change
that is predicted to mend it; where all hold, a change that frees GPUs and is predicted to hold too.
Predictions count only where the records cover them, and where what the planner says of the present
set-up agrees with what was measured; otherwise the advice goes by the measured load alone, and says
so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvxfer.errors import InvalidUsage
from kvxfer.pd.advise.by_load import cure, saving
from kvxfer.pd.advise.changes import (
    Basis,
    Change,
    Predicted,
    changes_of,
    load_of,
    predict_change,
    present_setup,
)
from kvxfer.pd.advise.observation import Observation
from kvxfer.pd.advise.targets import Judged, Target
from kvxfer.units import format_gpus

Outcome: TypeAlias = Literal["holds", "broken", "unclear", "idle"]
_NO_RECORDS: Final = "give --model, --engine and --sweep for a prediction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What came of it.

    Args:
        seen: the interval.
        judged: each target.
        outcome: of all of them: ``unclear`` where one could not be judged and none is broken.
        sentence: what to do, with its numbers.
        present: the set-up as it runs, predicted; None without records.
        tried: every change that was predicted; none where the planner is not to be believed.
        remarks: what a reader has to know, a text each.
    """

    seen: Observation
    judged: tuple[Judged, ...]
    outcome: Outcome
    sentence: str
    present: Predicted | None = None
    tried: tuple[Predicted, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Outlook:
    """Predictions, and why they do not count; ``doubt`` is empty where they do."""

    present: Predicted | None = None
    tried: tuple[Predicted, ...] = ()
    doubt: str = _NO_RECORDS


def advise(seen: Observation, targets: Sequence[Target], basis: Basis | None = None) -> Advice:
    """Judge an interval and say what to change.

    Args:
        targets: what has to hold.
        basis: what predictions stand on; None: the advice goes by the measured load alone.
    """
    judged = tuple(one.judge(seen.histograms.get(one.key)) for one in targets)
    outcome = _outcome(seen, judged)
    outlook = _Outlook() if basis is None else _look(seen, judged, basis)
    if outcome == "idle":
        sentence = (
            f"No request was there in {seen.seconds:.3g} s, so nothing can be said of "
            f"{_listed(map(str, targets))}; ask again under load."
        )
    elif outcome == "broken":
        sentence = _broken(seen, judged, outlook)
    elif outcome == "holds":
        sentence = _holds(seen, judged, outlook)
    else:
        sentence = _unclear(judged)
    return Advice(
        seen=seen,
        judged=judged,
        outcome=outcome,
        sentence=sentence,
        present=outlook.present,
        tried=outlook.tried,
        remarks=tuple(_remarks(seen, judged)),
    )


def _outcome(seen: Observation, judged: Sequence[Judged]) -> Outcome:
    verdicts = {one.verdict for one in judged}
    if "broken" in verdicts:
        return "broken"
    if verdicts == {"holds"}:
        return "holds"
    return "idle" if seen.is_idle and "holds" not in verdicts else "unclear"


def _look(seen: Observation, judged: Sequence[Judged], basis: Basis) -> _Outlook:
    """Predict the present set-up, and each change of it."""
    targets = [one.target for one in judged]
    try:
        setup, load = present_setup(seen, basis), load_of(seen)
    except InvalidUsage as error:
        return _Outlook(doubt=str(error))
    present = predict_change(Change("", setup), load, targets, basis.models)
    if doubt := _doubt(present, judged):
        return _Outlook(present, doubt=doubt)
    tried = tuple(
        predict_change(change, load, targets, basis.models) for change in changes_of(setup)
    )
    return _Outlook(present, tried, "")


def _doubt(present: Predicted, judged: Sequence[Judged]) -> str:
    """Why the planner is not to be believed here; empty where it is."""
    if present.uncovered:
        return f"the records do not cover this load ({'; '.join(present.uncovered)})"
    for one, value_ms in zip(judged, present.values_ms, strict=True):
        is_within = value_ms <= one.target.limit_ms
        if one.verdict in ("holds", "broken") and is_within != (one.verdict == "holds"):
            return (
                f"the planner's {_ms(value_ms)} for {one.target.name} of the present set-up is not "
                f"what was measured, {one.words}; measure the engine with kvxfer pd profile"
            )
    return ""


def _broken(seen: Observation, judged: Sequence[Judged], outlook: _Outlook) -> str:
    targets = [one.target for one in judged]
    broken = _listed(
        f"{one.target.name} is {one.words} where {one.target.limit_ms:g} ms are allowed"
        for one in judged
        if one.verdict == "broken"
    )
    start = f"The SLO is broken at {_load(seen)}: {broken}"
    down = sum(one.num_down for one in seen.stages)
    if down:
        return f"{start}; {down} of the engines are down: bring them back first."
    if outlook.doubt or outlook.present is None:
        return f"{start}; {cure(seen, judged)} (by the measured load alone: {outlook.doubt})."
    covered = [one for one in outlook.tried if not one.uncovered]
    enough = [one for one in covered if one.meets(targets)]
    if enough:
        best = min(enough, key=lambda one: (one.change.setup.num_gpus, one.excess(targets)))
        return f"{start}; {_told(best, outlook.present, targets)}."
    if not covered:
        return (
            f"{start}; {cure(seen, judged)} (by the measured load alone: the records cover the "
            "present set-up and no change of it)."
        )
    best = min(covered, key=lambda one: one.excess(targets))
    return (
        f"{start}; no single change is predicted to be enough, and the closest is to "
        f"{_told(best, outlook.present, targets)}."
    )


def _holds(seen: Observation, judged: Sequence[Judged], outlook: _Outlook) -> str:
    targets = [one.target for one in judged]
    kept = _listed(f"{one.target.name} {one.words} of {one.target.limit_ms:g}" for one in judged)
    start = f"The SLO holds at {_load(seen)}: {kept}"
    if outlook.doubt or outlook.present is None:
        return f"{start}; {saving(seen, judged)} (by the measured load alone: {outlook.doubt})."
    present = outlook.present.change.setup.num_gpus
    cheaper = [
        one for one in outlook.tried if one.change.setup.num_gpus < present and one.meets(targets)
    ]
    if not cheaper:
        return f"{start}; keep the set-up: no change that frees a GPU is predicted to hold."
    best = min(cheaper, key=lambda one: (one.change.setup.num_gpus, one.excess(targets)))
    saved = present - best.change.setup.num_gpus
    return f"{start}; to save {format_gpus(saved)}, {_told(best, outlook.present, targets)}."


def _unclear(judged: Sequence[Judged]) -> str:
    parts = []
    for one in judged:
        if one.verdict == "unclear":
            parts.append(
                f"{one.target.name} is {one.words}, and the limit of {one.target.limit_ms:g} ms "
                "lies inside that bucket"
            )
        elif one.verdict != "holds":
            parts.append(f"{one.target.name}: {one.words}")
    return f"Whether the SLO holds cannot be told: {_listed(parts)}."


def _told(one: Predicted, present: Predicted, targets: Sequence[Target]) -> str:
    setup, now = one.change.setup, present.change.setup
    figures = _listed(
        f"{target.name} {_ms(value_ms)} (now {_ms(before_ms)})"
        for target, value_ms, before_ms in zip(
            targets, one.values_ms, present.values_ms, strict=True
        )
    )
    budget = f" with {setup.token_budget} tokens a step" if setup.kind == "aggregated" else ""
    size = f"{setup.label}{budget}, {format_gpus(setup.num_gpus)}"
    if setup.num_gpus != now.num_gpus:
        size += f" instead of {now.num_gpus}"
    return f"{one.change.what} ({size}): the planner predicts {figures}"


def _remarks(seen: Observation, judged: Sequence[Judged]) -> Iterator[str]:
    for one in judged:
        if one.is_thin and one.found_s is not None:
            yield (
                f"{one.target.name} is of {one.num_values} values: little more than the largest; "
                "give a longer --interval"
            )
        if one.verdict == "missing":
            yield f"{one.target.name} is not measured by this server"
    for stage in seen.stages:
        if stage.num_down:
            total = stage.num_engines + stage.num_down
            yield f"{stage.num_down} of {total} {stage.role} engines are down"
    if seen.num_failed:
        yield f"{seen.num_failed} requests failed; they are in no percentile"
    yield from seen.remarks


def _load(seen: Observation) -> str:
    text = f"{seen.requests_per_s:.3g} requests a second"
    if seen.prompt_tokens == seen.prompt_tokens:  # not NaN
        text += f" of {seen.prompt_tokens:.0f} tokens in"
    if seen.output_tokens == seen.output_tokens:
        text += f", {seen.output_tokens:.0f} out"
    return text


def _ms(value: float) -> str:
    if value != value:
        return "none"
    return f"{value:.0f} ms" if value >= 100.0 else f"{value:.3g} ms"


def _listed(texts: "Iterator[str] | Sequence[str] | map[str]") -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last
