"""Static and dynamic batching: a batch starts together, and nothing joins it until all of it ended.

Static waits until a number of requests is there; dynamic waits for them or for a time after the
first. When nothing more can come, what is there runs. The baselines of Yu et al., "Orca: A
Distributed Serving System for Transformer-Based Generative Models", OSDI 2022. A request that ends
early leaves its place empty here; engines that pad go on computing it.
"""

from typing import TYPE_CHECKING

from kvxfer.pd.planner.strategies.continuous import whole_prompts

if TYPE_CHECKING:
    from kvxfer.pd.planner.simulation.engine import Chunk, Engine


class StaticBatching:
    """Batches of ``batch_size`` requests."""

    def __init__(self, batch_size: int) -> None:
        """No batch runs."""
        self._batch_size = batch_size

    def chunks(self, engine: "Engine") -> list["Chunk"]:
        """Whole prompts of the batch; the next batch when the last one has ended."""
        if not engine.num_running and self._is_complete(engine):
            num_admitted = 0
            while num_admitted < self._batch_size and engine.admit():
                num_admitted += 1
        return whole_prompts(engine, tuple(engine.prefilling))

    def joins(self, engine: "Engine") -> bool:
        """Never while a batch runs."""
        return not engine.num_running

    def _is_complete(self, engine: "Engine") -> bool:
        waiting = len(engine.waiting)
        return waiting >= self._batch_size or (engine.is_last_call and waiting > 0)


class DynamicBatching(StaticBatching):
    """Batches of ``batch_size`` requests, or of what came within a window after the first."""

    def __init__(self, batch_size: int, window_s: float) -> None:
        """No batch runs."""
        super().__init__(batch_size)
        self._window_s = window_s

    def _is_complete(self, engine: "Engine") -> bool:
        if super()._is_complete(engine):
            return True
        oldest_s = engine.waiting.oldest_s
        if oldest_s is None:
            return False
        closes_s = oldest_s + self._window_s
        if closes_s <= engine.clock.now_s:
            return True
        engine.clock.at(closes_s, engine.wake)
        return False
