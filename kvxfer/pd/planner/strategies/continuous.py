"""Continuous batching: a request that ends makes room for the next at once; prompts run whole.

A prompt takes one step together with the decodes, whatever the step then takes. Source: Yu et al.,
"Orca: A Distributed Serving System for Transformer-Based Generative Models", OSDI 2022.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvxfer.pd.planner.simulation.engine import Chunk, Engine
    from kvxfer.pd.planner.simulation.job import Job


class ContinuousBatching:
    """Whole prompts beside decodes, as many as the budget holds and at least one."""

    def chunks(self, engine: "Engine") -> list["Chunk"]:
        """Prompts that run first, then those that wait."""
        return whole_prompts(engine, engine.prompts())

    def joins(self, engine: "Engine") -> bool:
        """As soon as a step ends."""
        return True


def whole_prompts(engine: "Engine", jobs: "Iterable[Job]") -> list["Chunk"]:
    """All that is left of each prompt, as many as the token budget holds and at least one."""
    left = engine.token_budget
    found: list[Chunk] = []
    for job in jobs:
        num_tokens = job.prompt - job.computed
        if found and num_tokens > left:
            break
        found.append((job, num_tokens))
        left -= num_tokens
        if left <= 0:
            break
    return found
