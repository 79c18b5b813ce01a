"""The prompts: each has a beginning of its own, of which so many tokens are there already."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvxfer.errors import InvalidUsage
from kvxfer.pd.experiments.options import Options
from kvxfer.pd.launch.stores import LMCACHE_CHUNK_TOKENS

UNIT_TOKENS: Final = LMCACHE_CHUNK_TOKENS
"""Hits are whole chunks of LMCache, and so whole blocks of vLLM (16 or 128 tokens)."""
_MOST: Final = 1000
# Ids that every vocabulary of a language model has; special ones lie elsewhere.
_FIRST_ID, _END_ID = 300, 1000


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt: its first ``hit_tokens`` are there; ``index`` counts those of one length."""

    hit_tokens: int
    index: int
    prompt: tuple[int, ...]

    @property
    def name(self) -> str:
        """Part of the request's id; no case's name is part of another's."""
        return f"kvreuse.h{self.hit_tokens}.n{self.index}."

    @property
    def prefix(self) -> tuple[int, ...]:
        """What is there."""
        return self.prompt[: self.hit_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What each set-up is asked.

    Args:
        isl, osl: tokens in and out.
        hits: lengths of what is there.
        count: prompts of each.

    Raises:
        InvalidUsage: a number is out of range.
    """

    isl: int
    osl: int
    hits: tuple[int, ...]
    count: int

    def __post_init__(self) -> None:
        if self.isl % UNIT_TOKENS or not self.isl:
            raise InvalidUsage(f"prompts of {self.isl} tokens; use multiples of {UNIT_TOKENS}")
        if not self.hits or sorted(set(self.hits)) != list(self.hits):
            raise InvalidUsage(f"hits {self.hits}: name some, each once, in ascending order")
        for hit in self.hits:
            if hit % UNIT_TOKENS or not 0 <= hit <= self.isl:
                raise InvalidUsage(
                    f"a hit of {hit} of {self.isl} tokens; use multiples of {UNIT_TOKENS} up to "
                    "the prompt's length (--hits, --isl)"
                )
        if not 1 <= self.count <= _MOST:
            raise InvalidUsage(f"{self.count} prompts of each length; use 1 to {_MOST}")

    @property
    def keys(self) -> set[tuple[int, int]]:
        """Length of hit and index of each case."""
        return {(hit, index) for hit in self.hits for index in range(self.count)}

    def cases(self) -> Iterator[Case]:
        """All of them; lengths take turns, so that none has the quiet minutes of a run alone."""
        for index in range(self.count):
            yield from (self.case(hit, index) for hit in self.hits)

    def warm_up(self) -> Iterator[Case]:
        """One of each length, whose figures nobody keeps."""
        return (self.case(hit, self.count) for hit in self.hits)

    def case(self, hit_tokens: int, index: int) -> Case:
        """The same for every set-up and at every run."""
        rng = np.random.default_rng([self.isl, hit_tokens, index])
        prompt = rng.integers(_FIRST_ID, _END_ID, size=self.isl)
        return Case(hit_tokens, index, tuple(prompt.tolist()))


def sweep_of(options: Options) -> Sweep:
    """The sweep that an experiment's options describe: the longest of ``isl`` and of ``osl``.

    Raises:
        InvalidUsage: they do not describe one.
    """
    load = options.load
    return Sweep(
        isl=max(load.isl),
        osl=max(load.osl),
        hits=options.hits,
        count=load.prompts_per_concurrency,
    )
