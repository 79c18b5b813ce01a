"""What a plan compares: engines, their parallel sizes, and how they schedule and route.

Each field of a strategy is one technique; the module of `kvxfer.pd.planner.strategies` that plays
it says what it does and where it comes from.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec

from kvxfer.errors import InvalidUsage

Batching: TypeAlias = Literal["static", "dynamic", "continuous", "chunked"]
Routing: TypeAlias = Literal["round_robin", "least_loaded", "kv_aware"]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]


class RemoteStore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A KV store that all engines share; loads share its bandwidth.

    ``gb_per_s``: of all loads together; ``latency_s``: before the first byte of each;
    ``capacity_tokens``: the least recently used blocks leave above it.
    """

    gb_per_s: Annotated[float, msgspec.Meta(gt=0.0)]
    latency_s: _Seconds = 0.0
    capacity_tokens: _Positive = 1 << 30


class Strategy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How engines batch, and how requests are spread over them.

    Args:
        batching: ``static`` waits for ``batch_size`` requests, ``dynamic`` for them or for
            ``batch_window_s``; both run a batch to its end. ``continuous`` replaces a request as it
            ends, and runs whole prompts, before decodes. ``chunked`` fills each step up to the
            token budget, decodes first.
        num_parallel_prefills: prompts that share the budget of a step (``chunked``).
        num_long_prefills: of these, how many may be longer than ``long_prompt_tokens``.
        long_prompt_tokens: a prompt above it is long.
        long_penalty_s: a long prompt queues as if it had come that much later.
        num_long_engines: engines for long prompts alone, taken from those that prefill.
        routing: which engine a request goes to.
        prefix_cache: engines keep the KV of finished requests, as memory allows.
        store: a remote KV store, or none.
        kv_dtype: of the cache; ``auto`` is the model's own, ``fp8`` halves bf16.
    """

    batching: Batching = "chunked"
    batch_size: _Positive = 8
    batch_window_s: _Seconds = 0.1
    num_parallel_prefills: _Positive = 1
    num_long_prefills: _Positive = 1
    long_prompt_tokens: _Positive = 10_000
    long_penalty_s: _Seconds = 0.0
    num_long_engines: _Count = 0
    routing: Routing = "least_loaded"
    prefix_cache: bool = False
    store: RemoteStore | None = None
    kv_dtype: Literal["auto", "fp8"] = "auto"


class Setup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines of one plan.

    Args:
        kind: ``aggregated``: ``num_prefill`` engines that do both. ``pd``: engines for prefill and
            engines for decode.
        long_tp: parallel size of the engines for long prompts; None: ``prefill_tp``.
        token_budget: most tokens of one step of an engine (vLLM's ``max_num_batched_tokens``).
        max_num_seqs: most requests that an engine runs at once.
        first_token_from: which engine's token is a client's first: of ``prefill``, so that the
            transfer falls into the first gap (LMCache's proxy), or of ``decode``, so that TTFT
            holds it (vLLM's own connectors and kvxfer's).
        send: ``whole`` after the prefill, ``chunks`` as each is computed, or ``layers`` while the
            model runs, so that one layer of the last chunk is left at the end (kvxfer's connector).
        engines_per_link: neighbours in a pool that share a link, 1 for a port of each engine's own.

    Raises:
        InvalidUsage: the numbers do not make a set-up.
    """

    kind: Literal["aggregated", "pd"]
    num_prefill: _Positive = 1
    num_decode: _Count = 0
    prefill_tp: _Positive = 1
    decode_tp: _Positive = 1
    long_tp: _Positive | None = None
    token_budget: _Positive = 8192
    max_num_seqs: _Positive = 256
    first_token_from: Literal["prefill", "decode"] = "decode"
    send: Literal["whole", "chunks", "layers"] = "whole"
    engines_per_link: _Positive = 1
    strategy: Strategy = Strategy()

    def __post_init__(self) -> None:
        if (self.kind == "pd") != (self.num_decode > 0):
            raise InvalidUsage(
                f"{self.kind} with {self.num_decode} decode engines; "
                "pd has one or more, aggregated none"
            )
        if self.token_budget < self.max_num_seqs:
            raise InvalidUsage(
                f"token_budget is {self.token_budget}, below max_num_seqs, {self.max_num_seqs}: "
                "decodes could use it up; raise one or lower the other"
            )
        if self.strategy.num_long_engines >= self.num_prefill:
            raise InvalidUsage(
                f"num_long_engines is {self.strategy.num_long_engines} of {self.num_prefill} "
                "engines; leave one for other prompts"
            )

    @property
    def num_gpus(self) -> int:
        """GPUs of all engines together."""
        return sum(self.prefill_tps) + self.num_decode * self.decode_tp

    @property
    def prefill_tps(self) -> tuple[int, ...]:
        """Parallel size of each engine that prefills; those for long prompts come last."""
        num_long = self.strategy.num_long_engines
        plain = (self.prefill_tp,) * (self.num_prefill - num_long)
        return plain + (self.long_tp or self.prefill_tp,) * num_long

    @property
    def label(self) -> str:
        """``2 x TP4``; ``1P TP2 + 3D TP1``; with dedicated engines ``3 x TP2 + 1 x TP4 long``."""
        mark = "P" if self.kind == "pd" else " x"
        num_long = self.strategy.num_long_engines
        parts = [f"{self.num_prefill - num_long}{mark} TP{self.prefill_tp}"]
        if num_long:
            parts.append(f"{num_long}{mark} TP{self.long_tp or self.prefill_tp} long")
        if self.num_decode:
            parts.append(f"{self.num_decode}D TP{self.decode_tp}")
        return " + ".join(parts)
