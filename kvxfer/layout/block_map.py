"""Which tokens lie where on both sides: block tables cut where either side's block ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidUsage
from kvxfer.layout import _checks
from kvxfer.layout.block_ids import BlockIds, checked_ids, refuse_duplicates, require_within


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """The blocks of one request on one side, in the order of its tokens.

    Args:
        block_ids: integers ``[num_blocks]``.
        first_token: the token in the first slot of the first block; more than 0 where an engine no
            longer holds the beginning, as for a sliding window.

    Raises:
        InvalidUsage: ids of another type or shape, or a negative token.
    """

    block_ids: BlockIds
    first_token: int = 0

    def __post_init__(self) -> None:
        first = _checks.integer(
            "first_token", self.first_token, minimum=0, maximum=_checks.MAX_NUM_TOKENS
        )
        object.__setattr__(self, "first_token", first)


Blocks: TypeAlias = BlockIds | BlockTable


@dataclass(frozen=True, slots=True)
class _Side:
    name: str
    ids: NDArray[np.uint64]
    first_token: int
    block_size: int

    @property
    def tokens(self) -> range:
        return range(self.first_token, self.first_token + self.ids.size * self.block_size)

    def ids_of(self, tokens: range) -> NDArray[np.uint64]:
        first = (tokens.start - self.first_token) // self.block_size
        end = -(-(tokens.stop - self.first_token) // self.block_size)
        return self.ids[first:end]

    def boundaries(self, tokens: range) -> NDArray[np.int64]:
        """The tokens after the first of ``tokens`` that begin a block."""
        into = (tokens.start - self.first_token) % self.block_size
        first = tokens.start + self.block_size - into
        return np.arange(first, tokens.stop, self.block_size, dtype=np.int64)

    def place(
        self, tokens: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64] | int]:
        """(block ids, slots) of the tokens."""
        index, slot = np.divmod(tokens - self.first_token, self.block_size)
        return self.ids[index], slot


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of one length: uint32 ``[n, 4]`` of (src block, dst block, src slot, dst slot)."""

    num_tokens: int
    table: NDArray[np.uint32]


class BlockMap:
    """Two block tables of one request, matched. Plans of all pairs of ranks share it.

    Attributes:
        tokens: the tokens that it moves.
        src_block_size: tokens of a source block.
        dst_block_size: tokens of a destination block.
    """

    def __init__(
        self,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        src_block_size: int,
        dst_block_size: int,
        tokens: range | None = None,
        src_num_blocks: int = _checks.MAX_NUM_BLOCKS,
        dst_num_blocks: int = _checks.MAX_NUM_BLOCKS,
    ) -> None:
        """Match the tables.

        Args:
            src_blocks: blocks that are read; repeats allowed.
            dst_blocks: blocks that are written, each once.
            src_block_size: tokens of a source block.
            dst_block_size: tokens of a destination block.
            tokens: which tokens of the request to move, a range of step 1 that both tables hold;
                None = all, where both hold the same ones.
            src_num_blocks: blocks of the source's cache.
            dst_num_blocks: blocks of the destination's cache.

        Raises:
            InvalidUsage: ids of another type or shape or outside their cache, a destination
                named twice, or tokens that a table does not hold.
        """
        self.src_block_size = _checks.dimension("src_block_size", src_block_size)
        self.dst_block_size = _checks.dimension("dst_block_size", dst_block_size)
        self._src = _side("src_block_ids", src_blocks, self.src_block_size)
        self._dst = _side("dst_block_ids", dst_blocks, self.dst_block_size)
        limit = _checks.MAX_NUM_BLOCKS
        self.require_within(min(src_num_blocks, limit), min(dst_num_blocks, limit))
        self.tokens = self._checked_tokens(tokens)
        if self.tokens:
            refuse_duplicates("dst_block_ids", self._dst.ids_of(self.tokens))
        self._cut: dict[range, tuple[Segments, ...]] = {}

    def require_within(self, src_num_blocks: int, dst_num_blocks: int) -> None:
        """Check that both caches have the blocks.

        Raises:
            InvalidUsage: names the first id that is outside its cache.
        """
        require_within(self._src.name, self._src.ids, src_num_blocks)
        require_within(self._dst.name, self._dst.ids, dst_num_blocks)

    def last_tokens(self, window: int) -> range:
        """The tokens that a layer of this window still needs; all of them for 0."""
        start = self.tokens.start
        return range(max(start, self.tokens.stop - window) if window else start, self.tokens.stop)

    def segments(self, tokens: range) -> tuple[Segments, ...]:
        """``tokens`` cut where a block of either side ends, grouped by length.

        Raises:
            InvalidUsage: tokens that the map does not move.
        """
        if tokens not in self._cut:
            if tokens and not (tokens.start in self.tokens and tokens[-1] in self.tokens):
                raise InvalidUsage(f"{_said(tokens)} of a map that moves {_said(self.tokens)}")
            self._cut[tokens] = self._cut_at_blocks(tokens)
            for segments in self._cut[tokens]:
                segments.table.setflags(write=False)  # plans share it
        return self._cut[tokens]

    def _checked_tokens(self, tokens: range | None) -> range:
        held = (self._src.tokens, self._dst.tokens)
        if tokens is None:
            if held[0] != held[1]:
                raise InvalidUsage(
                    f"the source's {self._src.ids.size} blocks hold {_said(held[0])}, the "
                    f"destination's {self._dst.ids.size} {_said(held[1])}; say which to move with "
                    "tokens=range(first, end)"
                )
            return held[0]
        if not isinstance(tokens, range) or tokens.step != 1:
            raise InvalidUsage(f"tokens is {tokens!r}; use a range of step 1")
        for side, one in zip((self._src, self._dst), held, strict=True):
            if tokens and not (one.start <= tokens.start and tokens.stop <= one.stop):
                raise InvalidUsage(
                    f"{side.name} hold {_said(one)}, which does not cover {_said(tokens)}; give "
                    "the blocks of all tokens, or fewer tokens"
                )
        return tokens

    def _cut_at_blocks(self, tokens: range) -> tuple[Segments, ...]:
        if not tokens:
            return ()
        if self._whole_blocks(tokens):
            table = np.zeros((len(tokens) // self.src_block_size, 4), dtype=np.uint32)
            table[:, 0], table[:, 1] = self._src.ids_of(tokens), self._dst.ids_of(tokens)
            return (Segments(self.src_block_size, table),)
        cuts = self._src.boundaries(tokens)
        other = self._dst.boundaries(tokens)
        if not np.array_equal(cuts, other):
            cuts = _merged(cuts, other)
        bounds = np.concatenate(([tokens.start], cuts, [tokens.stop]))
        counts: NDArray[np.int64] = np.diff(bounds)
        table = np.empty((counts.size, 4), dtype=np.uint32)
        table[:, 0], table[:, 2] = self._src.place(bounds[:-1])
        table[:, 1], table[:, 3] = self._dst.place(bounds[:-1])
        lengths: Sequence[int] = _distinct(counts).tolist()
        return tuple(Segments(length, table[counts == length]) for length in reversed(lengths))

    def _whole_blocks(self, tokens: range) -> bool:
        size = self.src_block_size
        starts = (tokens.start - self._src.first_token, tokens.start - self._dst.first_token)
        whole = not any(start % size for start in (*starts, len(tokens)))
        return whole and size == self.dst_block_size


def _side(name: str, blocks: Blocks, block_size: int) -> _Side:
    table = blocks if isinstance(blocks, BlockTable) else BlockTable(blocks)
    return _Side(name, checked_ids(name, table.block_ids), table.first_token, block_size)


def _merged(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """The entries of two ascending arrays, each once; many times faster than numpy's union."""
    both = np.concatenate((one, other))
    both.sort(kind="stable")
    return both[np.concatenate(([True], both[1:] != both[:-1]))]


def _distinct(counts: NDArray[np.int64]) -> NDArray[np.intp]:
    """The distinct values, ascending; counted rather than sorted where that takes less."""
    if counts.max() > counts.size:
        return np.unique(counts).astype(np.intp)
    return np.flatnonzero(np.bincount(counts))


def _said(tokens: range) -> str:
    return f"tokens {tokens.start} to {tokens.stop - 1}" if tokens else "no tokens"
