"""Ways to batch: as the planner has them, and as vLLM is started where it has them too."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from kvxfer.pd.experiments.batching.blocking import Blocking
from kvxfer.pd.experiments.options import Options
from kvxfer.pd.launch.spec import SetupSpec
from kvxfer.pd.planner import Setup, Strategy

_MAX_SEQS: Final = 64
_BATCH: Final = 32
"""Of static and dynamic batching; with few a batch, engines spend their time half empty."""
_ROOM_TOKENS: Final = 64  # of the longest context, besides prompt and reply
_BUDGET: Final = "--max-num-batched-tokens"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to batch.

    Args:
        name: of its rows.
        what: vLLM's switches, or what is simulated.
        setup: as the planner has it; None: it cannot be simulated.
        spec: as vLLM is started; None: vLLM has no such.
    """

    name: str
    what: str
    setup: Setup | None
    spec: SetupSpec | None = None


@dataclass(frozen=True, slots=True)
class _Sizes:
    """In tokens: of the longest context, of large and of small chunks."""

    context: int
    large: int
    small: int

    @classmethod
    def of(cls, load: Blocking) -> "_Sizes":
        """Chunks are a quarter and a sixteenth of the long prompt, as far as an engine takes."""
        large, small = (max(_MAX_SEQS, load.long // parts) for parts in (4, 16))
        return cls(load.long + load.osl + _ROOM_TOKENS, large, small)

    @property
    def args(self) -> tuple[str, ...]:
        """Of every engine."""
        return ("--max-model-len", str(self.context), "--max-num-seqs", str(_MAX_SEQS))


def ways_of(load: Blocking) -> list[Way]:
    """Every way, those that vLLM has first."""
    sizes = _Sizes.of(load)
    return [*_of_vllm(sizes), *_simulated_only(sizes, load.threshold)]


def _of_vllm(sizes: _Sizes) -> list[Way]:
    context, large, small = sizes.context, sizes.large, sizes.small

    def told(name: str, *words: str) -> SetupSpec:
        return SetupSpec(name=name, kind="aggregated", prefill_args=(*sizes.args, *words))

    limit = ("--long-prefill-token-threshold", str(small))
    return [
        Way(
            "whole prompts",
            f"continuous batching: --no-enable-chunked-prefill {_BUDGET} {context}",
            _simulated(context, batching="continuous"),
            told("whole", "--no-enable-chunked-prefill", _BUDGET, str(context)),
        ),
        Way(
            f"chunks of {large}",
            f"{_BUDGET} {large}",
            _simulated(large),
            told("chunks-large", _BUDGET, str(large)),
        ),
        Way(
            f"chunks of {small}",
            f"{_BUDGET} {small}",
            _simulated(small),
            told("chunks-small", _BUDGET, str(small)),
        ),
        Way(
            "long prompts limited",
            f"{_BUDGET} {large} {' '.join(limit)}: no step holds more of one prompt",
            None,
            told("long-limited", _BUDGET, str(large), *limit),
        ),
        _prefill_apart(sizes),
    ]


def _prefill_apart(sizes: _Sizes) -> Way:
    whole = (*sizes.args, _BUDGET, str(sizes.context))
    return Way(
        "prefill apart",
        "a prefill and a decode engine",
        Setup(
            kind="pd",
            num_decode=1,
            token_budget=sizes.context,
            max_num_seqs=_MAX_SEQS,
            send="layers",
        ),
        SetupSpec(
            name="pd",
            kind="pd",
            connector="kvxfer",
            num_decode=1,
            prefill_args=whole,
            decode_args=whole,
        ),
    )


def _simulated_only(sizes: _Sizes, threshold: int) -> list[Way]:
    large, is_long = sizes.large, {"long_prompt_tokens": threshold}
    return [
        Way(
            "static",
            f"batches of {_BATCH} that nobody joins",
            _simulated(sizes.context, batching="static", batch_size=_BATCH),
        ),
        Way(
            "dynamic",
            f"batches of {_BATCH}, or of what came within 0.1 s; nobody joins",
            _simulated(sizes.context, batching="dynamic", batch_size=_BATCH),
        ),
        Way(
            "parallel prefill",
            f"4 prompts share a step of {large}, one of them long at most",
            _simulated(large, num_parallel_prefills=4, num_long_prefills=1, **is_long),
        ),
        Way(
            "long penalised",
            f"{_BUDGET} {large}; a long prompt queues as if it had come 1 s later, and "
            "begins at once where nobody waits",
            _simulated(large, long_penalty_s=1.0, **is_long),
        ),
        Way(
            "long apart",
            f"two engines, one for long prompts alone; {_BUDGET} {large}",
            _simulated(large, num_long_engines=1, **is_long),
        ),
    ]


def _simulated(budget: int, **strategy: object) -> Setup:
    played = msgspec.convert(strategy, Strategy)
    return Setup(
        kind="aggregated",
        num_prefill=1 + played.num_long_engines,
        token_budget=budget,
        max_num_seqs=_MAX_SEQS,
        strategy=played,
    )


def measured_ways(ways: Sequence[Way], options: Options) -> list[Way]:
    """Those that vLLM has, or the set-ups that the caller gives in their place."""
    if options.setups:
        return [
            Way(spec.name, f"as given: {text}", None, spec)
            for spec, text in zip(options.specs(), options.setups, strict=True)
        ]
    return [
        replace(way, spec=_with_args(way.spec, options)) for way in ways if way.spec is not None
    ]


def _with_args(spec: SetupSpec, options: Options) -> SetupSpec:
    """With what all engines are told besides."""
    return replace(
        spec,
        prefill_args=(*options.prefill_args, *spec.prefill_args),
        decode_args=(*options.decode_args, *spec.decode_args) if spec.kind == "pd" else (),
    )
