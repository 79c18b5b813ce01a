"""Chunked prefill: each step has a token for every decode, and prompts up to the token budget.

Prompts go in order; the last that fits is cut. Source: Agrawal et al., "Taming Throughput-Latency
Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024; as vLLM's scheduler does by default.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.pd.planner.simulation.engine import Chunk, Engine


class ChunkedPrefill:
    """Fill the budget, decodes first, then prompts in order."""

    def chunks(self, engine: "Engine") -> list["Chunk"]:
        """Prompts that run first, then those that wait, until the budget is used."""
        left = engine.token_budget - engine.num_decoding
        found: list[Chunk] = []
        jobs = engine.prompts()
        while left > 0 and (job := next(jobs, None)) is not None:
            num_tokens = min(left, job.prompt - job.computed)
            found.append((job, num_tokens))
            left -= num_tokens
        return found

    def joins(self, engine: "Engine") -> bool:
        """As soon as a step ends."""
        return True
