"""A hundred thousand requests through the planner's simulation, in processor seconds."""

import time
from typing import Any

import numpy as np
import pytest

from kvxfer.layout.models import load_model
from kvxfer.pd.planner import (
    EngineModel,
    KVSize,
    RemoteStore,
    Request,
    Setup,
    StepModel,
    Strategy,
    Trace,
    simulate,
)
from kvxfer.pd.planner.engine_model import DecodePoint, MeasuredRange

NUM_REQUESTS = 100_000
HASH_TOKENS = 512
NUM_GROUPS = 2_000  # of prompts that begin alike
MOST_BLOCKS = 256  # of a prompt
# Of the size of llama-3.1-8b on an H200; what they are exactly does not matter here.
ENGINE = EngineModel(
    name="round numbers",
    model="llama-3.1-8b",
    source="none",
    steps=[
        StepModel(
            tp_size=1,
            decode=[DecodePoint(1, 5e-3), DecodePoint(256, 8e-3)],
            context_s=30e-9,
            prefill_base_s=5e-3,
            token_s=20e-6,
            pair_s=0.1e-9,
            kv_capacity_tokens=600_000,
            measured=MeasuredRange(
                num_decoding=256, num_context_tokens=600_000, num_prompt_tokens=131_072
            ),
        )
    ],
)


def conversations(requests_per_s: float) -> Trace:
    """Lengths spread as in Mooncake's conversation trace, a third of each prompt's blocks shared.

    Prompts: lognormal with its median (6,909 tokens) and mean (12,035), to its longest (126,195);
    replies: exponential with its mean (343); arrivals: Poisson.
    """
    rng = np.random.default_rng(1)
    sigma = float(np.sqrt(2 * np.log(12_035 / 6_909)))
    prompts = np.clip(rng.lognormal(np.log(6_909), sigma, NUM_REQUESTS), 1, 126_195).astype(int)
    outputs = 1 + rng.exponential(342, NUM_REQUESTS).astype(int)
    arrivals_s = np.cumsum(rng.exponential(1 / requests_per_s, NUM_REQUESTS))
    groups = rng.integers(0, NUM_GROUPS, NUM_REQUESTS)
    requests = [
        Request(float(at_s), int(prompt), int(output), _hashes(at, int(group), int(prompt)))
        for at, (at_s, prompt, output, group) in enumerate(
            zip(arrivals_s, prompts, outputs, groups, strict=True)
        )
    ]
    return Trace("conversations", tuple(requests), hash_tokens=HASH_TOKENS)


def _hashes(request: int, group: int, num_tokens: int) -> tuple[int, ...]:
    """The blocks of a prompt: the first third are its group's, the others its own."""
    num_blocks = -(-num_tokens // HASH_TOKENS)
    shared = num_blocks // 3
    own = range(shared, num_blocks)
    return (
        *(group * MOST_BLOCKS + block for block in range(shared)),
        *((NUM_GROUPS + request) * MOST_BLOCKS + block for block in own),
    )


SETUPS = {
    "aggregated": (3.4, Setup(kind="aggregated", num_prefill=8, token_budget=2048)),
    "pd": (
        3.4,
        Setup(
            kind="pd",
            num_prefill=6,
            num_decode=4,
            token_budget=2048,
            strategy=Strategy(
                prefix_cache=True, routing="kv_aware", store=RemoteStore(gb_per_s=25.0)
            ),
        ),
    ),
    "2048 GPUs": (800.0, Setup(kind="aggregated", num_prefill=2048, token_budget=2048)),
}


@pytest.mark.timeout(600)
@pytest.mark.benchmark(group="planner, 100,000 requests", timer=time.process_time)
@pytest.mark.parametrize("name", SETUPS)
def test_simulate(benchmark: Any, name: str) -> None:
    requests_per_s, setup = SETUPS[name]
    trace = conversations(requests_per_s)
    kv = KVSize.of(load_model("llama-3.1-8b"))
    found = benchmark.pedantic(simulate, args=(setup, trace, ENGINE, kv), rounds=1)
    assert found.gaps.num_samples == pytest.approx(found.num_output_tokens.sum() - NUM_REQUESTS)
    benchmark.extra_info.update(
        num_runs=sum(map(len, found.timelines)),
        hit_share=float(found.num_hit_tokens.sum() / found.num_prompt_tokens.sum()),
        busy=max(found.busy),
    )
