"""Which set-ups a plan compares: every way to spend so many GPUs, and every strategy.

Aggregated set-ups are replicas of one size; a chunk budget concerns them alone, because only their
steps hold prompts and decodes together, so that a PD set-up takes the largest. A PD set-up is
``x`` prefill engines of one size and ``y`` decode engines of one size (xPyD). All of them spend
every GPU, so that set-ups of one number of GPUs are compared as equals.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias

import msgspec

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.setup import Setup, Strategy

Kind: TypeAlias = Literal["aggregated", "pd"]
MAX_CANDIDATES = 2_000
"""More set-ups than this are refused: each is simulated under every load."""

STRATEGIES: dict[str, Strategy] = {
    "chunked": Strategy(),
    "static": Strategy(batching="static"),
    "dynamic": Strategy(batching="dynamic"),
    "continuous": Strategy(batching="continuous"),
    "parallel-prefill": Strategy(num_parallel_prefills=4),
    "penalise-long": Strategy(long_penalty_s=1.0),
    "long-engine": Strategy(num_long_engines=1),
    "prefix-cache": Strategy(prefix_cache=True),
    "kv-aware": Strategy(prefix_cache=True, routing="kv_aware"),
    "fp8-kv": Strategy(kv_dtype="fp8"),
}
"""By name; each is one technique beside vLLM's default, which ``chunked`` is."""


@dataclass(frozen=True, slots=True)
class Named:
    """A set-up and the name that sets it apart from the others of its plan."""

    name: str
    setup: Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is searched.

    Args:
        num_gpus: totals to spend; a set-up spends one of them whole.
        tp_sizes: of an engine.
        kinds: which kinds of set-ups.
        token_budgets: most tokens of a step; the largest is that of every PD set-up.
        strategies: by name; see `parse_strategy`.
        long_tp: of engines for long prompts, under strategies with such; None: as the others.
        max_num_seqs, first_token_from, send: as of `Setup`.

    Raises:
        InvalidUsage: a number is below 1.
    """

    num_gpus: Sequence[int]
    tp_sizes: Sequence[int]
    kinds: Sequence[Kind] = ("aggregated", "pd")
    token_budgets: Sequence[int] = (8192,)
    strategies: Sequence[tuple[str, Strategy]] = (("chunked", Strategy()),)
    long_tp: int | None = None
    max_num_seqs: int = 256
    first_token_from: Literal["prefill", "decode"] = "decode"
    send: Literal["whole", "chunks", "layers"] = "layers"

    def __post_init__(self) -> None:
        for name in ("num_gpus", "tp_sizes", "token_budgets"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise InvalidUsage(
                    f"{name} is {list(values)}; use one number of 1 or more at least"
                )


def candidates(space: Space) -> list[Named]:
    """Every set-up of the space, by GPUs.

    A strategy that a set-up cannot have (an engine for long prompts, of one engine) is left out.

    Raises:
        InvalidUsage: there is none, or more than ``MAX_CANDIDATES``.
    """
    found: dict[str, Named] = {}
    for one in _all(space):
        found.setdefault(one.name, one)
        if len(found) > MAX_CANDIDATES:
            raise InvalidUsage(
                f"more than {MAX_CANDIDATES} set-ups; give fewer GPUs, TP sizes or strategies"
            )
    if not found:
        raise InvalidUsage(
            f"no set-up spends {_words(space.num_gpus)} GPUs with engines of "
            f"{_words(space.tp_sizes)}; give other --gpus or --tp"
        )
    return sorted(found.values(), key=lambda one: (one.setup.num_gpus, one.name))


def parse_strategy(text: str) -> tuple[str, Strategy]:
    """A strategy by name, with fields of `Strategy` changed, as ``chunked:prefix_cache=true``.

    ``store:gb_per_s=25`` is a remote KV store with prefix reuse; its fields are `RemoteStore`'s.

    Raises:
        InvalidUsage: the name or a field is not known, or a value is not of its kind.
    """
    name, *pairs = text.split(":")
    fields = dict(_pair(text, pair) for pair in pairs)
    try:
        if name == "store":
            return text, msgspec.convert({"prefix_cache": True, "store": fields}, Strategy)
        if name not in STRATEGIES:
            known = ", ".join([*STRATEGIES, "store"])
            raise InvalidUsage(f"--strategies: {name!r} is not known; use {known}")
        merged = {**msgspec.to_builtins(STRATEGIES[name]), **fields}
        return text, msgspec.convert(merged, Strategy)
    except msgspec.ValidationError as error:
        raise InvalidUsage(f"--strategies: {text!r}: {error}") from error


def _pair(text: str, pair: str) -> tuple[str, object]:
    key, equals, value = pair.partition("=")
    if not equals:
        raise InvalidUsage(f"--strategies: {text!r}: {pair!r} is no FIELD=VALUE")
    try:
        return key, msgspec.json.decode(value.encode())
    except msgspec.DecodeError:
        return key, value  # a word


def _all(space: Space) -> Iterator[Named]:
    for total, (name, strategy) in product(sorted(set(space.num_gpus)), space.strategies):
        num_long = strategy.num_long_engines
        for tp in space.tp_sizes if num_long else (0,):
            long_tp = (space.long_tp or tp) if num_long else None
            # Of that size are the engines for others; those for long prompts replace some of them.
            for setup in _layouts(space, total + num_long * (tp - (long_tp or 0))):
                if num_long < setup.num_prefill and tp in (0, setup.prefill_tp):
                    played = msgspec.structs.replace(setup, strategy=strategy, long_tp=long_tp)
                    yield _named(space, name, played)


def _layouts(space: Space, total: int) -> Iterator[Setup]:
    if "aggregated" in space.kinds:
        for tp, budget in product(space.tp_sizes, space.token_budgets):
            if total % tp == 0:
                yield Setup(
                    kind="aggregated",
                    num_prefill=total // tp,
                    prefill_tp=tp,
                    token_budget=budget,
                    max_num_seqs=space.max_num_seqs,
                )
    if "pd" in space.kinds:
        for prefill_tp, decode_tp in product(space.tp_sizes, repeat=2):
            for num_prefill in range(1, (total - 1) // prefill_tp + 1):
                rest = total - num_prefill * prefill_tp
                if rest and rest % decode_tp == 0:
                    yield Setup(
                        kind="pd",
                        num_prefill=num_prefill,
                        num_decode=rest // decode_tp,
                        prefill_tp=prefill_tp,
                        decode_tp=decode_tp,
                        token_budget=max(space.token_budgets),
                        first_token_from=space.first_token_from,
                        send=space.send,
                        max_num_seqs=space.max_num_seqs,
                    )


def _named(space: Space, strategy: str, setup: Setup) -> Named:
    if setup.kind == "aggregated":
        name = f"agg-{setup.num_prefill}xtp{setup.prefill_tp}"
        if len(set(space.token_budgets)) > 1:
            name += f"-b{setup.token_budget}"
    else:
        name = f"pd-{setup.num_prefill}xtp{setup.prefill_tp}+{setup.num_decode}xtp{setup.decode_tp}"
    return Named(name if len(space.strategies) == 1 else f"{name}/{strategy}", setup)


def _words(values: Sequence[int]) -> str:
    return " or ".join(map(str, values))
