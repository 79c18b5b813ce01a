"""The costs of a running engine, from a short measurement over its API.

What a client sees of one prompt alone is ``request_s`` and its steps; of several prompts sent at
once each after the first adds its steps alone. The difference gives both. A decode step is the
time of a stream by its tokens while a known number of requests decodes and none prefills.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvxfer.errors import InvalidUsage
from kvxfer.pd.analysis.replies import ONE_READ_MS
from kvxfer.pd.planner.decode_gaps import decode_gaps
from kvxfer.pd.planner.engine_model import StepModel, pairs_of
from kvxfer.pd.planner.fitting import StepRow, fit_steps
from kvxfer.pd.planner.profile_streams import Ask, Stream, TimeUp
from kvxfer.pd.summary import Floats

PROMPTS = (128, 512, 2048, 8192)
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 2048)
_REPEATS = 3
_TOGETHER = 4  # prompts sent at once
_STEPS = 32  # of decoding alone that a batch is seen for
_QUANTILES = 100  # of the jitter
_TOGETHER_SHARE = 0.1  # of a usual gap: what came together


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """What is asked.

    Args:
        prompts: lengths of prompts, ascending.
        batches: requests that decode at once, ascending.
        contexts: lengths of their prompts.
        token_budget: the engine's most tokens of one step.
        longest: most tokens of a request, prompt and answer; what is longer is not asked.
    """

    prompts: Sequence[int] = PROMPTS
    batches: Sequence[int] = BATCHES
    contexts: Sequence[int] = CONTEXTS
    token_budget: int = 8192
    longest: int | None = None

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens can be asked."""
        return self.longest is None or num_tokens <= self.longest

    def output_tokens(self, batch: int, context: int) -> int:
        """So many that the first of a batch still decodes ``_STEPS`` when the last has prefilled.

        Each step of a prefill gives those that decode already one token at the most.
        """
        return _STEPS + batch * math.ceil(context / self.token_budget)


@dataclass(slots=True)
class Profile:
    """What was measured: rows for the fit, and what a request costs besides steps."""

    rows: list[StepRow] = field(default_factory=list)
    request_s: float = 0.0
    gaps: list[tuple[StepRow, list[float]]] = field(default_factory=list)  # of each decode row
    most_context: int = 0  # tokens of all sequences of a decode step together, at its end
    first_tokens_together: bool = False  # the second token comes with the first
    cut_off: bool = False  # the time was up before all was asked
    warnings: list[str] = field(default_factory=list)  # what figures suffer from
    joined: list[tuple[str, float]] = field(default_factory=list)  # loads; share of gaps of no time

    def see_first_gaps(
        self, first_s: Sequence[float] | Floats, later_s: Sequence[float] | Floats
    ) -> None:
        """Note whether second tokens come with first ones: in under a tenth of the usual gap."""
        if len(first_s) and len(later_s):
            together = float(np.median(first_s)) < _TOGETHER_SHARE * float(np.median(later_s))
            self.first_tokens_together = together

    def fit(self, tp_size: int, kv_capacity_tokens: int | None = None) -> StepModel:
        """The costs, with the spread of the gaps around them as jitter.

        Raises:
            InvalidUsage: what was measured does not suffice.
        """
        model = fit_steps(
            self.rows,
            tp_size=tp_size,
            request_s=self.request_s,
            kv_capacity_tokens=kv_capacity_tokens,
        )
        measured = msgspec.structs.replace(
            model.measured,
            num_context_tokens=max(model.measured.num_context_tokens, self.most_context),
        )
        return with_jitter(msgspec.structs.replace(model, measured=measured), self.gaps)


def profile(
    ask: Ask, plan: ProfilePlan, watch: Callable[[str], None] = lambda text: None
) -> Profile:
    """Ask, from short to long and from few to many, until all is known or the time is up.

    Args:
        ask: sends requests; raises `TimeUp` once its time is over.
        watch: told what is asked next.

    Raises:
        NotAvailable: nobody answers, or the time was over before any batch was measured.
        InvalidUsage: no prompt or batch fits the engine's longest request, or no decode step can be
            told from its streams.
    """
    found = Profile()
    try:
        _prefills(ask, plan, found, watch)
        for batch in plan.batches:
            for context in plan.contexts:
                _decode(ask, plan, batch, context, found, watch)
    except TimeUp:
        if not found.gaps:
            raise
        found.cut_off = True
    if not found.gaps and found.warnings:
        raise InvalidUsage(
            f"{found.warnings[0]}; ask the engine itself, past what holds streams up"
        )
    if not found.gaps:
        raise InvalidUsage(f"no request fits in {plan.longest} tokens; give shorter --contexts")
    if found.joined:
        what, share = max(found.joined, key=lambda one: one[1])
        found.warnings.append(
            f"messages came together in {len(found.joined)} of {len(found.gaps)} loads ({what}: "
            f"{share:.0%} of the gaps are under {ONE_READ_MS} ms): their steps are means, and the "
            "spread of their gaps is left out"
        )
    return found


def _prefills(ask: Ask, plan: ProfilePlan, found: Profile, watch: Callable[[str], None]) -> None:
    lengths = [length for length in plan.prompts if plan.fits(length + 1)]
    if not lengths:
        raise InvalidUsage(f"no prompt fits in {plan.longest} tokens; give shorter --prompts")
    ask(1, lengths[0], 2)  # the first request of a size may compile or capture something
    alone_s = {}
    for length in lengths:
        watch(f"a prompt of {length} tokens")
        times_s = [_first_token_s(ask(1, length, 1)) for _ in range(_REPEATS)]
        alone_s[length] = float(np.median(times_s))
    watch(f"{_TOGETHER} prompts of {lengths[-1]} tokens")
    all_s = _first_token_s(ask(_TOGETHER, lengths[-1], 1))
    step_s = (all_s - alone_s[lengths[-1]]) / (_TOGETHER - 1)
    shortest_s = min(alone_s.values())
    found.request_s = float(np.clip(alone_s[lengths[-1]] - step_s, 0.0, 0.9 * shortest_s))
    for length, total_s in alone_s.items():
        row = StepRow(
            total_s - found.request_s,
            num_prompt_tokens=length,
            num_pairs=pairs_of(length, 0),
            num_steps=math.ceil(length / plan.token_budget),
            longest_prompt_tokens=length,
        )
        found.rows.append(row)


def _first_token_s(streams: Sequence[Stream]) -> float:
    """From sending until all of them have their first token."""
    return max(one.tokens_s[0] for one in streams) - min(one.sent_s for one in streams)


def _decode(
    ask: Ask,
    plan: ProfilePlan,
    batch: int,
    context: int,
    found: Profile,
    watch: Callable[[str], None],
) -> None:
    num_output = plan.output_tokens(batch, context)
    if not plan.fits(context + num_output):
        return
    watch(f"{batch} decoding at {context} tokens")
    streams = ask(batch, context, num_output)
    seen = decode_gaps(streams, num_output)
    what = f"{batch} decoding at {context} tokens"
    if seen is None:
        found.warnings.append(f"{what}: all messages came at once, so it is left out")
        return
    if not seen.are_of_steps:
        found.joined.append((what, seen.joined))
    elif batch == 1:
        first_s = [one.tokens_s[1] - one.tokens_s[0] for one in streams if len(one.tokens_s) > 1]
        found.see_first_gaps(first_s, seen.gaps_s)
    # The middle of what was decoded while all of them did.
    held = batch * (context + num_output - _STEPS / 2)
    row = StepRow(seen.step_s, num_decoding=batch, num_context_tokens=held)
    found.rows.append(row)
    found.gaps.append((row, seen.gaps_s if seen.are_of_steps else []))
    found.most_context = max(found.most_context, batch * (context + num_output))


def with_jitter(model: StepModel, gaps: Sequence[tuple[StepRow, Sequence[float]]]) -> StepModel:
    """The same costs with the spread of gaps around them: quantiles of equal weight, mean 1.

    Args:
        gaps: rows of the fit, and the gaps in seconds that each is of; none where they say nothing.
    """
    alone = _spread([one for one in gaps if one[0].num_decoding <= 1])
    shared = _spread([one for one in gaps if one[0].num_decoding > 1]) or alone
    if not shared:
        return model
    return msgspec.structs.replace(model, jitter=shared, jitter_alone=alone)


def _spread(gaps: Sequence[tuple[StepRow, Sequence[float]]]) -> list[float]:
    ratios = [np.asarray(gaps_s) / row.step_s for row, gaps_s in gaps if gaps_s and row.step_s > 0]
    if not ratios:
        return []
    at = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    quantiles = np.quantile(np.concatenate(ratios), at).clip(1e-3, 1e3)
    return (quantiles / quantiles.mean()).tolist()  # type: ignore[no-any-return]
