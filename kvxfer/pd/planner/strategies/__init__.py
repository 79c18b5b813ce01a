"""Techniques of scheduling and routing, one a module, each behind one of two protocols.

`Batching` decides what an engine computes next, a router which engine a request goes to.
"""

from typing import TYPE_CHECKING, Protocol

from kvxfer.pd.planner.setup import Strategy
from kvxfer.pd.planner.strategies.batches import DynamicBatching, StaticBatching
from kvxfer.pd.planner.strategies.chunked import ChunkedPrefill
from kvxfer.pd.planner.strategies.continuous import ContinuousBatching
from kvxfer.pd.planner.strategies.parallel_prefill import ParallelPrefill

if TYPE_CHECKING:
    from kvxfer.pd.planner.simulation.engine import Chunk, Engine


class Batching(Protocol):
    """What an engine runs next."""

    def chunks(self, engine: "Engine") -> list["Chunk"]:
        """The part of each prompt that the next step computes; admits requests as it needs them."""

    def joins(self, engine: "Engine") -> bool:
        """Whether a request that comes now may join those that run, at the end of a step."""


def batching_of(strategy: Strategy) -> Batching:
    """The batching that a strategy asks for; each engine needs one of its own."""
    if strategy.batching == "static":
        return StaticBatching(strategy.batch_size)
    if strategy.batching == "dynamic":
        return DynamicBatching(strategy.batch_size, strategy.batch_window_s)
    if strategy.batching == "continuous":
        return ContinuousBatching()
    if strategy.num_parallel_prefills > 1:
        return ParallelPrefill(strategy.num_parallel_prefills, strategy.num_long_prefills)
    return ChunkedPrefill()
