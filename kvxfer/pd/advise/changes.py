"""What may be changed of a set-up in one step, and what the planner predicts of each change."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvxfer.errors import InvalidUsage
from kvxfer.pd.advise.observation import Observation
from kvxfer.pd.advise.targets import Target
from kvxfer.pd.planner.predict import Models, predict
from kvxfer.pd.planner.setup import Setup
from kvxfer.pd.planner.trace import Trace
from kvxfer.pd.planner.traces import open_loop

_NUM_REQUESTS: Final = 1000
_LEAST_BUDGET: Final = 512
_MOST_BUDGET: Final = 65_536


@dataclass(frozen=True, slots=True)
class Basis:
    """What predictions stand on, and what the metrics do not tell of the set-up.

    Args:
        models: the costs.
        prefill_tp, decode_tp: GPUs of an engine; an aggregated one has ``prefill_tp``.
        token_budget: most tokens of a step (``--max-num-batched-tokens``).
        max_num_seqs: most requests that an engine runs at once.
    """

    models: Models
    prefill_tp: int = 1
    decode_tp: int = 1
    token_budget: int = 8192
    max_num_seqs: int = 256


@dataclass(frozen=True, slots=True)
class Change:
    """One step away from the present set-up; ``what`` is an imperative, empty for the present."""

    what: str
    setup: Setup


@dataclass(frozen=True, slots=True)
class Predicted:
    """A change, and what would come of it under the load that was seen.

    Args:
        values_ms: one for each target.
        uncovered: why the records do not cover it; empty where they do.
    """

    change: Change
    values_ms: tuple[float, ...]
    uncovered: tuple[str, ...]

    def meets(self, targets: Sequence[Target]) -> bool:
        """Whether it is covered and keeps every target; NaN (no such value) keeps one."""
        return not self.uncovered and self.excess(targets) <= 1.0

    def excess(self, targets: Sequence[Target]) -> float:
        """The worst ratio of what is predicted to what is allowed."""
        pairs = zip(self.values_ms, targets, strict=True)
        ratios = [value / one.limit_ms for value, one in pairs if not math.isnan(value)]
        return max(ratios, default=0.0)


def present_setup(seen: Observation, basis: Basis) -> Setup:
    """The set-up that runs; engines that are down are not of it.

    Raises:
        InvalidUsage: no engine of a role is up, or the options contradict each other.
    """
    first = seen.stage("engine") or seen.stage("prefill")
    decode = seen.stage("decode")
    if first is None or not first.num_engines or (decode is not None and not decode.num_engines):
        raise InvalidUsage("no engine of a role is up, so that nothing can be predicted")
    engines = Setup(
        kind="aggregated",
        num_prefill=first.num_engines,
        prefill_tp=basis.prefill_tp,
        decode_tp=basis.decode_tp,
        token_budget=basis.token_budget,
        max_num_seqs=basis.max_num_seqs,
    )
    if decode is None:
        return engines
    return msgspec.structs.replace(
        engines,
        kind="pd",
        num_decode=decode.num_engines,
        first_token_from="prefill" if seen.connector == "lmcache" else "decode",
        send="layers" if seen.connector == "kvxfer" else "whole",
    )


def changes_of(setup: Setup) -> Iterator[Change]:
    """Every single step: an engine more, fewer or of the other role, other kind or chunks."""
    yield from _of_pd(setup) if setup.kind == "pd" else _of_aggregated(setup)


def _of_pd(setup: Setup) -> Iterator[Change]:
    num_prefill, num_decode = setup.num_prefill, setup.num_decode
    for what, by_prefill, by_decode in (
        ("add a prefill engine", 1, 0),
        ("add a decode engine", 0, 1),
        ("make a decode engine a prefill engine", 1, -1),
        ("make a prefill engine a decode engine", -1, 1),
        ("take a prefill engine away", -1, 0),
        ("take a decode engine away", 0, -1),
    ):
        is_swap = by_prefill and by_decode
        if min(num_prefill + by_prefill, num_decode + by_decode) < 1 or (
            is_swap and setup.prefill_tp != setup.decode_tp
        ):
            continue
        yield Change(
            what,
            msgspec.structs.replace(
                setup, num_prefill=num_prefill + by_prefill, num_decode=num_decode + by_decode
            ),
        )
    if setup.prefill_tp == setup.decode_tp:
        for num, what in (
            (num_prefill + num_decode, "aggregate: let every engine do both"),
            (num_prefill + num_decode - 1, "aggregate on an engine fewer"),
        ):
            yield Change(
                what,
                msgspec.structs.replace(setup, kind="aggregated", num_prefill=num, num_decode=0),
            )


def _of_aggregated(setup: Setup) -> Iterator[Change]:
    budget, num = setup.token_budget, setup.num_prefill
    for other in (budget // 4, budget // 2, budget * 2):
        if max(_LEAST_BUDGET, setup.max_num_seqs) <= other <= _MOST_BUDGET:
            yield Change(
                f"set --max-num-batched-tokens to {other}",
                msgspec.structs.replace(setup, token_budget=other),
            )
    if num > 1:
        yield Change("take an engine away", msgspec.structs.replace(setup, num_prefill=num - 1))
    yield Change("add an engine", msgspec.structs.replace(setup, num_prefill=num + 1))
    total = max(2, num)
    for num_prefill in range(1, total):
        yield Change(
            f"separate prefill from decode, {num_prefill} to {total - num_prefill}",
            msgspec.structs.replace(
                setup,
                kind="pd",
                num_prefill=num_prefill,
                num_decode=total - num_prefill,
                decode_tp=setup.prefill_tp,
                send="layers",
            ),
        )


def load_of(seen: Observation) -> Trace:
    """Requests of the mean lengths that were seen, at the rate that was seen, Poisson.

    Raises:
        InvalidUsage: no request ended in the interval, so that lengths are not known.
    """
    lengths = (seen.prompt_tokens, seen.output_tokens)
    if any(math.isnan(value) for value in lengths) or seen.requests_per_s <= 0:
        raise InvalidUsage(
            "no streamed request came and ended in the interval; give a longer --interval"
        )
    isl, osl = (max(1, round(value)) for value in lengths)
    return open_loop(
        isl=isl, osl=osl, requests_per_s=seen.requests_per_s, num_requests=_NUM_REQUESTS
    )


def predict_change(
    change: Change, load: Trace, targets: Sequence[Target], models: Models
) -> Predicted:
    """Simulate a change; what the records do not cover is said, and never an error."""
    try:
        point = predict(change.setup, load, models)
    except InvalidUsage as error:
        return Predicted(change, (math.nan,) * len(targets), (str(error),))
    return Predicted(change, tuple(one.of(point.summary) for one in targets), point.extrapolated)
