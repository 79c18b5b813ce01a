"""Engines, caches and sweeps of round numbers for tests of the planner."""

from typing import Any

from kvxfer.pd.planner import EngineModel, KVSize, StepModel, TransferModel
from kvxfer.pd.planner.engine_model import DecodePoint, MeasuredRange
from kvxfer.sweep.result import Latency, Median, Rate, SweepResult

KV = KVSize("a model", bytes_per_token=131_072, page_bytes=32_768, num_layers=32, num_kv_heads=8)
DECODE_S = 5e-3
PREFILL_S = 170e-3  # of 8192 tokens, about


def step_model(**changes: Any) -> StepModel:
    """5 ms a decode step, whatever is in it, and 20 us a token of a prompt."""
    fields: dict[str, Any] = {
        "tp_size": 1,
        "decode": [DecodePoint(1, DECODE_S)],
        "context_s": 0.0,
        "prefill_base_s": DECODE_S,
        "token_s": 20e-6,
        "pair_s": 0.0,
        "measured": MeasuredRange(
            num_decoding=256, num_context_tokens=1 << 22, num_prompt_tokens=1 << 17
        ),
    }
    return StepModel(**(fields | changes))


def engine_model(*sizes: StepModel, **changes: Any) -> EngineModel:
    """An engine of these sizes, or of one GPU."""
    fields: dict[str, Any] = {"name": "an engine", "model": "a model", "source": "a test"}
    return EngineModel(**(fields | changes), steps=list(sizes) or [step_model()])


def sweep_row(
    num_bytes: int = 1 << 30, gb_per_s: float = 100.0, *, run_bytes: int = 32_768, **changes: Any
) -> SweepResult:
    """A verified row: so many bytes at such a rate."""
    latency_us = num_bytes / gb_per_s / 1e3
    fields: dict[str, Any] = {
        "transport": "nvlink",
        "model": "raw",
        "num_tokens": 8192,
        "block_size": 16,
        "page_bytes": run_bytes,
        "num_pages": num_bytes // run_bytes,
        "total_bytes": num_bytes,
        "src_tp": 1,
        "dst_tp": 1,
        "order": "nhd",
        "block_order": "shuffled",
        "sm_count": 8,
        "num_threads": 0,
        "iters": 5,
        "gb_per_s": Rate(gb_per_s, gb_per_s, gb_per_s),
        "latency_us": Latency(latency_us, latency_us, latency_us),
        "limit_gb_per_s": 400.0,
        "fraction_of_limit": gb_per_s / 400.0,
        "plan_us": Median(50.0),
        "post_us": Median(50.0),
        "verified": True,
        "actual_path": "nvlink",
        "notes": [],
        "op": "put",
        "memory": "device",
        "dtype": "bfloat16",
    }
    return SweepResult(**(fields | changes))


def transfer_model(gb_per_s: float = 100.0, **changes: Any) -> TransferModel:
    """From 1 MiB to 4 GiB at one rate."""
    rows = tuple(sweep_row(size, gb_per_s) for size in (1 << 20, 1 << 32))
    return TransferModel("a test", rows, **changes)
