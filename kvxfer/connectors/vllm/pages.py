"""The scheduler's tokens and blocks as those of a worker's cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.connectors.vllm.step import Table
from kvxfer.layout import BlockTable, BlockTables
from kvxfer.session import Granted, Offer

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Pages:
    """How a worker's cache divides what the scheduler counts.

    What is copied is a whole number of *units*: tokens, or whole blocks where an attention kernel
    keeps the tokens of a block in an order of its own (CPUs transpose K). And a kernel may take
    smaller blocks than the scheduler hands out: the scheduler's block ``b`` is then blocks
    ``b * ratio`` to ``b * ratio + ratio - 1`` of the cache.

    Attributes:
        block_units: units a block of the cache holds.
        unit_tokens: tokens a unit holds.
        ratio: blocks of the cache in one of the scheduler's.
        format: in what order a unit's elements lie; both engines must have the same.
    """

    block_units: int
    unit_tokens: int = 1
    ratio: int = 1
    format: str = PLAIN

    def num_units(self, num_tokens: int) -> int:
        """Units that hold the first ``num_tokens`` tokens of a request."""
        return -(-num_tokens // self.unit_tokens)

    def units_of(self, tokens: tuple[int, int], *, is_last: bool) -> range:
        """The units that are ready with ``tokens``, of a request whose tokens come in order.

        A unit that is not full goes with the part that fills it, or with the last.
        """
        end = self.num_units(tokens[1]) if is_last else tokens[1] // self.unit_tokens
        return range(tokens[0] // self.unit_tokens, end)

    def windows(self, window_tokens: int) -> int:
        """Units that a window of so many tokens may touch; 0 for no window."""
        if window_tokens == 0:
            return 0
        return (window_tokens + self.unit_tokens - 2) // self.unit_tokens + 1

    def source(self, tables: Sequence[Table]) -> BlockTables:
        """The blocks of a part that is sent, of each group."""
        return BlockTables(
            BlockTable(self._ids(table), self._first_unit(table)) for table in tables
        )

    def target(self, tables: Sequence[Table], offer: Offer) -> Granted:
        """The blocks for what a sender offers, of each group; none where no tables are given."""
        ids, first_units = [], []
        for group, wanted in enumerate(offer.blocks):
            begins = wanted.stop  # all is here already
            held: NDArray[np.int64] = np.empty(0, np.int64)
            if tables:
                first = self._first_unit(tables[group]) // self.block_units
                begins = max(first, wanted.start)
                held = self._ids(tables[group])[begins - first : wanted.stop - first]
            ids.append(held)
            first_units.append(begins * self.block_units)
        return Granted(ids, first_units)

    def _ids(self, table: Table) -> NDArray[np.int64]:
        ids: NDArray[np.int64] = np.array(table.block_ids, np.int64)
        if self.ratio > 1:
            ids = (ids[:, None] * self.ratio + np.arange(self.ratio)).ravel()
        return ids

    def _first_unit(self, table: Table) -> int:
        return table.first_token // self.unit_tokens
