"""The blocks of one request on one side: a table, or one for each group of layers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.layout import _checks
from kvxfer.layout.block_ids import BlockIds, checked_ids


@dataclass(frozen=True, slots=True, eq=False, init=False)
class BlockTable:
    """The blocks of one request on one side, in the order of its tokens.

    A copy is kept, so that one table may serve many transfers and is judged once. Compared by
    identity.

    Attributes:
        block_ids: uint64 ``[num_blocks]``, read-only.
        first_token: the token in the first slot of the first block; more than 0 where an engine no
            longer holds the beginning, as for a sliding window.
    """

    block_ids: NDArray[np.uint64]
    first_token: int

    def __init__(
        self, block_ids: BlockIds, first_token: int = 0, *, name: str = "block_ids"
    ) -> None:
        """Of integers ``[num_blocks]``, which errors call ``name``.

        Raises:
            InvalidUsage: ids of another type or shape, or a negative token.
        """
        ids = checked_ids(name, block_ids)
        ids.setflags(write=False)
        object.__setattr__(self, "block_ids", ids)
        first = _checks.integer(
            "first_token", first_token, minimum=0, maximum=_checks.MAX_NUM_TOKENS
        )
        object.__setattr__(self, "first_token", first)

    def tokens(self, block_size: int) -> range:
        """The tokens that have a slot, of blocks of ``block_size`` tokens."""
        return range(self.first_token, self.first_token + self.block_ids.size * block_size)


@dataclass(frozen=True, slots=True, eq=False, init=False)
class BlockTables:
    """The blocks of one request on one side whose layers form groups (`KVLayout.groups`).

    Attributes:
        tables: one for each group, in the order of their numbers.
    """

    tables: tuple[BlockTable, ...]

    def __init__(self, tables: "Iterable[BlockTable | BlockIds]") -> None:
        """Of tables, or of the ids of tables that begin at token 0.

        Raises:
            InvalidUsage: see `BlockTable`.
        """
        made = tuple(one if isinstance(one, BlockTable) else BlockTable(one) for one in tables)
        object.__setattr__(self, "tables", made)


Blocks: TypeAlias = BlockIds | BlockTable | BlockTables


def as_tables(blocks: Blocks, name: str = "block_ids") -> tuple[BlockTable, ...]:
    """One table a group; ids alone, which errors call ``name``, are a table from token 0 on.

    Raises:
        InvalidUsage: see `BlockTable`.
    """
    if isinstance(blocks, BlockTables):
        return blocks.tables
    return (blocks if isinstance(blocks, BlockTable) else BlockTable(blocks, name=name),)
