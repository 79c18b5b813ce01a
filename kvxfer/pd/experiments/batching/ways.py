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


def ways_of(load: Blocking) -> list[Way]:
    """Every way, those that vLLM has first.

    Chunks are a quarter and a sixteenth of the long prompt, as far as an engine takes them.
    """
    context = load.long + load.osl + _ROOM_TOKENS
    large, small = (max(_MAX_SEQS, load.long // parts) for parts in (4, 16))
    common = ("--max-model-len", str(context), "--max-num-seqs", str(_MAX_SEQS))

    def simulated(budget: int, **strategy: object) -> Setup:
        played = msgspec.convert(strategy, Strategy)
        return Setup(
            kind="aggregated",
            num_prefill=1 + played.num_long_engines,
            token_budget=budget,
            max_num_seqs=_MAX_SEQS,
            strategy=played,
        )

    def told(name: str, *words: str) -> SetupSpec:
        return SetupSpec(name=name, kind="aggregated", prefill_args=(*common, *words))

    apart = Setup(
        kind="pd",
        num_decode=1,
        token_budget=context,
        max_num_seqs=_MAX_SEQS,
        send="layers",
    )
    whole = (*common, _BUDGET, str(context))
    limit = ("--long-prefill-token-threshold", str(small))
    is_long = {"long_prompt_tokens": load.threshold}
    return [
        Way(
            "whole prompts",
            f"continuous batching: --no-enable-chunked-prefill {_BUDGET} {context}",
            simulated(context, batching="continuous"),
            told("whole", "--no-enable-chunked-prefill", _BUDGET, str(context)),
        ),
        Way(
            f"chunks of {large}",
            f"{_BUDGET} {large}",
            simulated(large),
            told("chunks-large", _BUDGET, str(large)),
        ),
        Way(
            f"chunks of {small}",
            f"{_BUDGET} {small}",
            simulated(small),
            told("chunks-small", _BUDGET, str(small)),
        ),
        Way(
            "long prompts limited",
            f"{_BUDGET} {large} {' '.join(limit)}: no step holds more of one prompt",
            None,
            told("long-limited", _BUDGET, str(large), *limit),
        ),
        Way(
            "prefill apart",
            "a prefill and a decode engine",
            apart,
            SetupSpec(
                name="pd",
                kind="pd",
                connector="kvxfer",
                num_decode=1,
                prefill_args=whole,
                decode_args=whole,
            ),
        ),
        Way(
            "static",
            f"batches of {_BATCH} that nobody joins",
            simulated(context, batching="static", batch_size=_BATCH),
        ),
        Way(
            "dynamic",
            f"batches of {_BATCH}, or of what came within 0.1 s; nobody joins",
            simulated(context, batching="dynamic", batch_size=_BATCH),
        ),
        Way(
            "parallel prefill",
            f"4 prompts share a step of {large}, one of them long at most",
            simulated(large, num_parallel_prefills=4, num_long_prefills=1, **is_long),
        ),
        Way(
            "long penalised",
            f"{_BUDGET} {large}; a long prompt queues as if it had come 1 s later, and "
            "begins at once where nobody waits",
            simulated(large, long_penalty_s=1.0, **is_long),
        ),
        Way(
            "long apart",
            f"two engines, one for long prompts alone; {_BUDGET} {large}",
            simulated(large, num_long_engines=1, **is_long),
        ),
    ]


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
