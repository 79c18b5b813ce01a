"""How long a step of an engine takes: schema ``kvxfer.pd.engine/1``.

A step runs ``B`` sequences that decode, which hold ``C`` tokens of context together, and chunks of
prompts, ``p`` tokens in all, whose tokens attend to ``q`` tokens together::

    without chunks    d(B) + context_s * C
    with chunks       prefill_base_s + token_s * p + pair_s * q + d(B) - d(0) + context_s * C

``d`` goes straight from point to point of ``decode`` and is flat below the first, ``d(0)``.
``DESIGN.md`` says where the form comes from. Fields are only ever added within version 1.
"""

import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from kvxfer.errors import InvalidUsage
from kvxfer.whole_file import read_bounded, write_whole

MAX_ENGINE_BYTES = 4 << 20

_Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
_Quantiles: TypeAlias = Annotated[
    list[Annotated[float, msgspec.Meta(gt=0.0, le=1e3)]], msgspec.Meta(max_length=100)
]


class DecodePoint(msgspec.Struct, frozen=True):
    """A step of ``num_sequences`` that decode, without their context."""

    num_sequences: _Positive
    step_s: _Seconds


class MeasuredRange(msgspec.Struct, frozen=True, kw_only=True):
    """The largest of each that the fit has seen; beyond it a prediction is extrapolated.

    ``num_context_tokens``: of all decoding sequences of a step together; ``num_prompt_tokens``: of
    one prompt.
    """

    num_decoding: _Positive
    num_context_tokens: _Positive
    num_prompt_tokens: _Positive


class Residual(msgspec.Struct, frozen=True, kw_only=True):
    """How far a fit is from its rows, relative: 0.05 is 5 %."""

    num_rows: _Positive
    rms: float
    worst: float


class StepModel(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of one engine at one tensor-parallel size.

    Args:
        tp_size: GPUs of the engine.
        decode: points of ``d`` by ascending number of sequences, with times that do not fall.
        context_s: a token of context of a decoding sequence.
        prefill_base_s: a step that has chunks, whatever they hold.
        token_s: a token of a chunk.
        pair_s: a token of a chunk and a token that it attends to.
        request_s: what a request takes before its first step: HTTP, tokenizer, queues.
        kv_capacity_tokens: that fit the KV memory; None: not known, taken as without limit.
        measured: what the fit has seen.
        residual: of the fit, None where the numbers were not fitted.
        jitter: measured by predicted time of a step, as quantiles of equal weight (mean 1); empty:
            every step takes just its time.
        jitter_alone: the same of steps of one sequence, which no other's arrival disturbs; empty:
            as of the others.

    Raises:
        InvalidUsage: points out of order, or steps of no time.
    """

    tp_size: _Positive
    decode: Annotated[list[DecodePoint], msgspec.Meta(min_length=1, max_length=64)]
    context_s: _Seconds
    prefill_base_s: _Seconds
    token_s: _Seconds
    pair_s: _Seconds
    request_s: _Seconds = 0.0
    kv_capacity_tokens: _Positive | None = None
    measured: MeasuredRange
    residual: Residual | None = None
    jitter: _Quantiles = []
    jitter_alone: _Quantiles = []

    def __post_init__(self) -> None:
        if any(
            two.num_sequences <= one.num_sequences or two.step_s < one.step_s
            for one, two in pairwise(self.decode)
        ):
            raise InvalidUsage("the points of decode do not ascend in num_sequences and step_s")
        if self.step_s(num_decoding=1) <= 0.0 or self.step_s(num_prompt_tokens=1) <= 0.0:
            raise InvalidUsage("a step takes no time; give decode and prefill_base_s or token_s")

    def decode_s(self, num_sequences: float) -> float:
        """``d(B)``; beyond the last point it goes on with the slope of the last two."""
        points = self.decode
        if num_sequences <= points[0].num_sequences or len(points) == 1:
            return points[0].step_s
        high = next(
            (at for at in range(1, len(points)) if num_sequences <= points[at].num_sequences),
            len(points) - 1,
        )
        low, top = points[high - 1], points[high]
        slope_s = (top.step_s - low.step_s) / (top.num_sequences - low.num_sequences)
        return low.step_s + slope_s * (num_sequences - low.num_sequences)

    def step_s(
        self,
        *,
        num_decoding: float = 0,
        num_context_tokens: float = 0,
        num_prompt_tokens: float = 0,
        num_pairs: float = 0.0,
    ) -> float:
        """Seconds of one step.

        Args:
            num_decoding: sequences that get a token.
            num_context_tokens: that these hold together.
            num_prompt_tokens: of all chunks.
            num_pairs: of all chunks together, :func:`pairs_of` each.
        """
        decode_s = self.decode_s(num_decoding) + self.context_s * num_context_tokens
        if not num_prompt_tokens:
            return decode_s
        chunks_s = self.token_s * num_prompt_tokens + self.pair_s * num_pairs
        return self.prefill_base_s + chunks_s + decode_s - self.decode[0].step_s

    def prefill_s(self, num_prompt_tokens: int, token_budget: int) -> float:
        """Seconds of the steps of one prompt alone."""
        num_steps = math.ceil(num_prompt_tokens / token_budget)
        chunks_s = self.token_s * num_prompt_tokens + self.pair_s * pairs_of(num_prompt_tokens, 0)
        return num_steps * self.prefill_base_s + chunks_s


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """An engine with a model on a kind of GPU.

    Args:
        name: a label, such as ``vLLM 0.25.1, H200``.
        model: what it serves.
        source: where the figures come from, for the reader.
        steps: one for each tensor-parallel size.
        kv_dtype: of its cache.
        first_tokens_together: the engine hands out a request's first token with its second, as
            vLLM's asynchronous scheduling does: TTFT holds the first gap, which is then none.
    """

    schema: Literal["kvxfer.pd.engine/1"] = "kvxfer.pd.engine/1"
    name: str
    model: str
    source: str
    steps: Annotated[list[StepModel], msgspec.Meta(min_length=1, max_length=16)]
    kv_dtype: str = "bfloat16"
    first_tokens_together: bool = False

    def at_tp(self, tp_size: int) -> StepModel:
        """The costs at a tensor-parallel size.

        Raises:
            InvalidUsage: it has none.
        """
        for steps in self.steps:
            if steps.tp_size == tp_size:
                return steps
        known = ", ".join(str(steps.tp_size) for steps in self.steps)
        raise InvalidUsage(
            f"the engine {self.name} has no figures for TP {tp_size}, only for {known}; "
            "measure it with `kvxfer pd profile`"
        )


def pairs_of(num_tokens: int, num_before: int) -> float:
    """Pairs of a token of a chunk and a token that it attends to: itself and all before it.

    ``num_before``: tokens of the same prompt that are in the cache.
    """
    return num_tokens * (num_before + (num_tokens + 1) / 2)


def load_engine(path: Path) -> EngineModel:
    """Read ``engine.json``.

    Raises:
        InvalidUsage: it is missing, too large or not of the schema; names the field.
    """
    try:
        return msgspec.json.decode(read_bounded(path, MAX_ENGINE_BYTES), type=EngineModel)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidUsage(f"{path} is not an engine's figures: {error}") from error


def engine_json(engine: EngineModel) -> bytes:
    """As ``engine.json`` has it."""
    return msgspec.json.format(msgspec.json.encode(engine), indent=2) + b"\n"


def save_engine(path: Path, engine: EngineModel) -> None:
    """Write ``engine.json``, whole or not at all.

    Raises:
        InvalidUsage: it cannot be written; names the path and the cause.
    """
    write_whole(path, engine_json(engine))
