"""The prompts of one length of hit in one set-up as a point, and whether its figures may be shown.

A point is shown only where the engine counted just the hits that it was to have, where all of them
came from the far store if there is one, and, with a model whose answers say it, where every answer
is that of the set-up without reuse.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvxfer.pd.experiment_result import How
from kvxfer.pd.experiments.kv_reuse.cases import UNIT_TOKENS
from kvxfer.pd.experiments.kv_reuse.parts import FIELDS, Parts
from kvxfer.pd.experiments.kv_reuse.record import Asked, ReuseRun
from kvxfer.pd.launch.stores import STORES, has_far_store
from kvxfer.pd.summary import Distribution

EXACT_MODEL: Final = "tiny"
"""Weights in float32, random, and the same for all; the answer depends on all of the prompt."""

Answers = Mapping[tuple[int, int], str]
"""Of the set-up without reuse, by length of hit and index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Prompts of one length of hit.

    Args:
        run: of which set-up.
        hit_tokens: as asked for; what is loaded of a whole prompt is a block or a token less.
        loaded_tokens: as the engine counted, a prompt.
        ttft: of all of them.
        parts: the mean of those that have any; None where none has.
        how: they were got.
    """

    run: ReuseRun
    hit_tokens: int
    loaded_tokens: float
    ttft: Distribution
    parts: Parts | None
    how: How

    @property
    def name(self) -> str:
        """Of the set-up."""
        return self.run.setup.name

    @property
    def has_store(self) -> bool:
        """Whether hits come from a store."""
        return self.run.setup.reuse in STORES

    @property
    def is_whole(self) -> bool:
        """Whether all of the prompt was there."""
        return self.hit_tokens == self.run.isl

    @property
    def loaded_bytes(self) -> float:
        """KV of one prompt that came from the store."""
        return self.loaded_tokens * self.run.token_bytes

    @property
    def mean_ttft_s(self) -> float:
        """Of all of them."""
        return float(self.ttft.values_ms.mean()) / 1e3


def points_of(runs: Sequence[ReuseRun], how: How) -> tuple[list[Point], list[str], list[str]]:
    """The points that may be shown; faults of the others; and notes."""
    points: list[Point] = []
    faults: list[str] = []
    notes: dict[str, None] = {}
    for run in runs:
        expected = answers_of(runs, run)
        if expected is None:
            notes[_not_compared(run)] = None
        for hit in sorted({one.hit_tokens for one in run.asked}):
            asked = [one for one in run.asked if one.hit_tokens == hit]
            found = list(faults_of(run, asked, expected))
            faults += [f"{run.setup.name}, {hit} tokens there: {text}" for text in found]
            if not found:
                points.append(_point(run, hit, asked, how))
                notes.update(dict.fromkeys(_partless(run, hit, asked)))
    return points, faults, list(notes)


def answers_of(runs: Sequence[ReuseRun], run: ReuseRun) -> Answers | None:
    """What ``run`` should have answered; None where that says nothing of its KV."""
    same = (one for one in runs if (one.isl, one.osl) == (run.isl, run.osl))
    plain = next((one for one in same if one.setup.reuse == "none"), None)
    if plain is None or {plain.setup.model, run.setup.model} != {EXACT_MODEL}:
        return None
    return {(one.hit_tokens, one.index): one.text for one in plain.asked}


def faults_of(run: ReuseRun, asked: Sequence[Asked], expected: Answers | None) -> Iterator[str]:
    """What keeps these prompts from being shown."""
    wrong = [one for one in asked if not _has_its_hits(run, one)]
    if wrong:
        one = wrong[0]
        yield (
            f"{len(wrong)} of {len(asked)} prompts had other hits, such as {one.cached_tokens} "
            f"tokens in the engine's own prefix cache and {one.loaded_tokens} from a store"
        )
    nearer = [one for one in asked if not _is_from_afar(run, one)]
    if nearer:
        one = nearer[0]
        yield (
            f"{len(nearer)} of {len(asked)} prompts had hits that are not from the far store, such "
            f"as {one.loaded_tokens} tokens with {one.far_chunks} chunks read from there and "
            f"{one.near_chunks} not"
        )
    if expected is not None:
        others = [
            one for one in asked if one.text != expected.get((one.hit_tokens, one.index), one.text)
        ]
        if others:
            yield (
                f"{len(others)} of {len(asked)} answers are not those without reuse, such as "
                f"{others[0].text!r}"
            )


def _has_its_hits(run: ReuseRun, one: Asked) -> bool:
    """Whether the engine found what was there, where it was to find it.

    The first new token is sampled from what is computed, so never all of a prompt is taken from the
    engine's own cache. Of a store all may be loaded; the engine then computes the last token again.
    """
    reuse = run.setup.reuse
    wanted = 0 if reuse == "none" else one.hit_tokens
    found, elsewhere, most = one.cached_tokens, one.loaded_tokens, min(wanted, run.isl - 1)
    if reuse in STORES:
        found, elsewhere, most = elsewhere, found, wanted
    least = wanted - UNIT_TOKENS if wanted == run.isl else wanted
    return elsewhere == 0 and least <= found <= most


def _is_from_afar(run: ReuseRun, one: Asked) -> bool:
    """Whether all that was loaded was read from the far store, where the set-up has one. A chunk of
    several ranks is several of the store's."""
    if not has_far_store(run.setup.reuse):
        return True
    return one.near_chunks == 0 and one.far_chunks * UNIT_TOKENS >= one.loaded_tokens


def _point(run: ReuseRun, hit: int, asked: Sequence[Asked], how: How) -> Point:
    parts = [one.parts for one in asked if one.parts is not None]
    return Point(
        run=run,
        hit_tokens=hit,
        loaded_tokens=float(np.mean([one.loaded_tokens for one in asked])),
        ttft=Distribution.of(np.array([one.ttft_s * 1e3 for one in asked])),
        parts=_mean(parts) if parts else None,
        how=how,
    )


def _mean(parts: Sequence[Parts]) -> Parts:
    return Parts(**{name: float(np.mean([getattr(one, name) for one in parts])) for name in FIELDS})


def _partless(run: ReuseRun, hit: int, asked: Sequence[Asked]) -> Iterator[str]:
    reasons = [one.no_parts for one in asked if one.no_parts]
    if reasons:
        yield (
            f"{run.setup.name}, {hit} tokens there: {len(reasons)} of {len(asked)} prompts have no "
            f"parts: {reasons[0]}"
        )


def _not_compared(run: ReuseRun) -> str:
    if run.setup.model != EXACT_MODEL:
        return (
            f"answers of {run.setup.model} were not compared: invented weights and rounding make "
            "them say nothing of the KV that came; the engine's counters were checked"
        )
    return "answers were not compared: there is no set-up with reuse=none of the same lengths"
