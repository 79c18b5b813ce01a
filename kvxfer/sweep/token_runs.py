"""Which tokens of a cache carry the pattern, and under which keys.

A token's key is its place in the pool of the source, block * block size + slot. So the content of a
token says where it came from, whatever the layout and the block size on the other side.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidUsage

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRuns:
    """Runs of neighbouring tokens, each inside one block.

    Attributes:
        block_ids: the block of each run, int64 ``[num_runs]``.
        slots: the slot of its first token.
        counts: its tokens.
        keys: the key of its first token; the next token has one more.
    """

    block_ids: Ids
    slots: Ids
    counts: Ids
    keys: Ids

    @property
    def num_tokens(self) -> int:
        """Tokens of all runs."""
        return int(self.counts.sum())

    @classmethod
    def whole_blocks(cls, block_ids: Ids, block_size: int) -> "TokenRuns":
        """Blocks that hold what they are filled with in place."""
        zeros = np.zeros(block_ids.size, np.int64)
        return cls(block_ids, zeros, zeros + block_size, block_ids * block_size)

    @classmethod
    def request(
        cls, block_ids: Ids, source_ids: Ids, *, block_size: int, source_block_size: int, count: int
    ) -> "TokenRuns":
        """The first ``count`` tokens of a request, in its destination's blocks.

        Raises:
            InvalidUsage: a table has not the blocks that so many tokens take.
        """
        needed = (-(-count // block_size), -(-count // source_block_size))
        if (block_ids.size, source_ids.size) != needed:
            raise InvalidUsage(
                f"{block_ids.size} blocks, but {source_ids.size} of the source, for {count} "
                f"tokens; give {needed[0]} and {needed[1]}"
            )
        # No run crosses the end of a block of either side.
        step = gcd(block_size, source_block_size)
        first = np.arange(0, count, step, dtype=np.int64)
        return cls(
            block_ids[first // block_size],
            first % block_size,
            np.minimum(step, count - first),
            source_ids[first // source_block_size] * source_block_size + first % source_block_size,
        )

    @classmethod
    def outside_request(
        cls, block_ids: Ids, *, block_size: int, num_blocks: int, count: int
    ) -> "TokenRuns":
        """All other slots of a pool of ``num_blocks``, under keys of their own."""
        listed = np.zeros(num_blocks, dtype=bool)
        listed[block_ids] = True
        whole = cls.whole_blocks(np.flatnonzero(~listed), block_size)
        used = count % block_size
        if not used:
            return whole
        last = block_ids[-1:]
        slots, counts = np.full(1, used, np.int64), np.full(1, block_size - used, np.int64)
        return cls(
            np.concatenate([whole.block_ids, last]),
            np.concatenate([whole.slots, slots]),
            np.concatenate([whole.counts, counts]),
            np.concatenate([whole.keys, last * block_size + used]),
        )
