"""Request-parallel prefill: several prompts share each step's budget, few of them long.

Short prompts pass long ones that wait, and are not held up by one that runs: a fast lane. Source:
vLLM 0.7's ``max_num_partial_prefills`` and ``max_long_partial_prefills``, as in TNG's "How Long
Prompts Block Other Requests".
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.pd.planner.simulation.engine import Chunk, Engine


class ParallelPrefill:
    """Up to ``num_prompts`` at a time, of which ``num_long`` may be long."""

    def __init__(self, num_prompts: int, num_long: int) -> None:
        """Set the limits."""
        self._num_prompts = num_prompts
        self._num_long = num_long

    def chunks(self, engine: "Engine") -> list["Chunk"]:
        """Equal parts of the budget; what one does not need goes to the others, in order."""
        self._admit(engine)
        left = engine.token_budget - engine.num_decoding
        found: list[Chunk] = []
        by_need = sorted(engine.prefilling, key=lambda job: job.prompt - job.computed)
        for at, job in enumerate(by_need):
            share = left // (len(by_need) - at)
            num_tokens = min(share, job.prompt - job.computed)
            if num_tokens > 0:
                found.append((job, num_tokens))
                left -= num_tokens
        return found

    def joins(self, engine: "Engine") -> bool:
        """As soon as a step ends."""
        return True

    def _admit(self, engine: "Engine") -> None:
        while engine.num_prompts < self._num_prompts:
            num_long = sum(job.is_long for job in engine.prefilling)
            if not engine.admit(allow_long=num_long < self._num_long):
                return
