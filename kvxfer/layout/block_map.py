"""Which tokens lie where on both sides: block tables cut where either side's block ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidUsage
from kvxfer.layout import _checks
from kvxfer.layout.block_ids import refuse_duplicates, require_within
from kvxfer.layout.block_table import Blocks, BlockTable, as_tables


@dataclass(frozen=True, slots=True)
class _Side:
    name: str
    ids: NDArray[np.uint64]
    tokens: range
    block_size: int
    end_id: int  # one past the largest id: every plan asks

    @classmethod
    def of(cls, name: str, table: BlockTable, block_size: int) -> "_Side":
        ids = table.block_ids
        end_id = int(ids.max()) + 1 if ids.size else 0
        return cls(name, ids, table.tokens(block_size), block_size, end_id)

    def require_holds(self, tokens: range) -> None:
        held = self.tokens
        if tokens and not (held.start <= tokens.start and tokens.stop <= held.stop):
            raise InvalidUsage(
                f"{self.name} hold {_said(held)}, which does not cover {_said(tokens)}; give the "
                "blocks of all tokens, or fewer tokens"
            )

    def ids_of(self, tokens: range) -> NDArray[np.uint64]:
        """The blocks in which tokens of the table lie; none for no tokens."""
        if not tokens:
            return self.ids[:0]
        first = (tokens.start - self.tokens.start) // self.block_size
        end = -(-(tokens.stop - self.tokens.start) // self.block_size)
        return self.ids[max(first, 0) : max(end, 0)]

    def boundaries(self, tokens: range) -> NDArray[np.int64]:
        """The tokens after the first of ``tokens`` that begin a block."""
        into = (tokens.start - self.tokens.start) % self.block_size
        first = tokens.start + self.block_size - into
        return np.arange(first, tokens.stop, self.block_size, dtype=np.int64)

    def place(
        self, tokens: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64] | int]:
        """(block ids, slots) of the tokens."""
        index, slot = np.divmod(tokens - self.tokens.start, self.block_size)
        return self.ids[index], slot


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of one length: uint32 ``[n, 4]`` of (src block, dst block, src slot, dst slot)."""

    num_tokens: int
    table: NDArray[np.uint32]


class BlockMap:
    """The block tables of one request on two sides, matched. Plans of all pairs of ranks share it.

    Where the layers of a side form groups it has a table for each of them, and every group of one
    side is matched with every group of the other whose layers it shares.

    Attributes:
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
        tokens: range | Sequence[range] | None = None,
        end: int | None = None,
        src_num_blocks: int = _checks.MAX_NUM_BLOCKS,
        dst_num_blocks: int = _checks.MAX_NUM_BLOCKS,
    ) -> None:
        """Match the tables.

        Args:
            src_blocks: blocks that are read; repeats allowed.
            dst_blocks: blocks that are written, each once.
            src_block_size: tokens of a source block.
            dst_block_size: tokens of a destination block.
            tokens: which tokens of the request to move, a range of step 1, or one for each table
                of the destination; None = all, of one table a side that hold the same ones.
                Of several tables each holds what the windows of its layers leave of them.
            end: the end of a request of which ``tokens`` are a part: windows count back from it,
                and tables need not hold what lies outside them. None = the end of ``tokens``.
            src_num_blocks: blocks of the source's cache.
            dst_num_blocks: blocks of the destination's cache.

        Raises:
            InvalidUsage: ids of another type or shape or outside their cache, a destination
                named twice, or tokens that a table does not hold.
        """
        self.src_block_size = _checks.dimension("src_block_size", src_block_size)
        self.dst_block_size = _checks.dimension("dst_block_size", dst_block_size)
        self._src = _sides("src_block_ids", src_blocks, self.src_block_size)
        self._dst = _sides("dst_block_ids", dst_blocks, self.dst_block_size)
        limit = _checks.MAX_NUM_BLOCKS
        self.require_within(min(src_num_blocks, limit), min(dst_num_blocks, limit))
        self._tokens = self._checked_tokens(tokens)
        self._end = max(one.stop for one in self._tokens) if end is None else end
        if self.num_tables == (1, 1) and end is None:  # else windows say what each must hold
            for side in (*self._src, *self._dst):
                side.require_holds(self._tokens[0])
        self._refuse_duplicates()
        self._cut: dict[tuple[range, int, int], tuple[Segments, ...]] = {}

    @property
    def num_tables(self) -> tuple[int, int]:
        """Tables of the source and of the destination."""
        return len(self._src), len(self._dst)

    @property
    def tokens(self) -> range:
        """The tokens that it moves; of several tables those of the first."""
        return self._tokens[0]

    def require_within(self, src_num_blocks: int, dst_num_blocks: int) -> None:
        """Check that both caches have the blocks.

        Raises:
            InvalidUsage: names the first id that is outside its cache.
        """
        for sides, num_blocks in ((self._src, src_num_blocks), (self._dst, dst_num_blocks)):
            for side in sides:
                if side.end_id > num_blocks:
                    require_within(side.name, side.ids, num_blocks)

    def last_tokens(self, window: int, dst_group: int = 0) -> range:
        """The tokens to move that a layer of this window still needs; all of them for 0."""
        tokens = self._tokens[dst_group]
        start = max(tokens.start, self._end - window) if window else tokens.start
        return range(min(start, tokens.stop), tokens.stop)

    def segments(
        self, tokens: range, src_group: int = 0, dst_group: int = 0
    ) -> tuple[Segments, ...]:
        """``tokens`` cut where a block of either side ends, grouped by length.

        Raises:
            InvalidUsage: tokens that the map does not move, or that a table does not hold.
        """
        key = (tokens, src_group, dst_group)
        if key not in self._cut:
            moved = self._tokens[dst_group]
            if tokens and not (moved.start <= tokens.start and tokens.stop <= moved.stop):
                raise InvalidUsage(f"{_said(tokens)} of a map that moves {_said(moved)}")
            sides = self._src[src_group], self._dst[dst_group]
            for side in sides:
                side.require_holds(tokens)
            self._cut[key] = _cut_at_blocks(*sides, tokens)
            for segments in self._cut[key]:
                segments.table.setflags(write=False)  # plans share it
        return self._cut[key]

    def _checked_tokens(self, tokens: range | Sequence[range] | None) -> tuple[range, ...]:
        if tokens is None:
            return (self._common_tokens(),)
        several = isinstance(tokens, tuple | list)
        given = cast(tuple[range, ...], tuple(tokens) if several else (tokens,) * len(self._dst))
        if not all(isinstance(one, range) and one.step == 1 for one in given):
            raise InvalidUsage(f"tokens is {tokens!r}; use a range of step 1")
        if len(given) != len(self._dst):
            raise InvalidUsage(
                f"{len(given)} ranges of tokens for {len(self._dst)} tables of the destination; "
                "give one for all, or one a table"
            )
        return given

    def _common_tokens(self) -> range:
        if self.num_tables != (1, 1):
            raise InvalidUsage(
                "tables of groups of layers do not say which tokens to move; say it with "
                "tokens=range(first, end)"
            )
        (src,), (dst,) = self._src, self._dst
        if src.tokens != dst.tokens:
            raise InvalidUsage(
                f"the source's {src.ids.size} blocks hold {_said(src.tokens)}, the destination's "
                f"{dst.ids.size} {_said(dst.tokens)}; say which to move with "
                "tokens=range(first, end)"
            )
        return src.tokens

    def _refuse_duplicates(self) -> None:
        written = [
            side.ids_of(tokens) for side, tokens in zip(self._dst, self._tokens, strict=True)
        ]
        ids = written[0] if len(written) == 1 else np.concatenate(written)
        refuse_duplicates("dst_block_ids", ids)


def _cut_at_blocks(src: _Side, dst: _Side, tokens: range) -> tuple[Segments, ...]:
    if not tokens:
        return ()
    if _whole_blocks(src, dst, tokens):
        table = np.zeros((len(tokens) // src.block_size, 4), dtype=np.uint32)
        table[:, 0], table[:, 1] = src.ids_of(tokens), dst.ids_of(tokens)
        return (Segments(src.block_size, table),)
    cuts = src.boundaries(tokens)
    other = dst.boundaries(tokens)
    if not np.array_equal(cuts, other):
        cuts = _merged(cuts, other)
    bounds = np.concatenate(([tokens.start], cuts, [tokens.stop]))
    counts: NDArray[np.int64] = np.diff(bounds)
    table = np.empty((counts.size, 4), dtype=np.uint32)
    table[:, 0], table[:, 2] = src.place(bounds[:-1])
    table[:, 1], table[:, 3] = dst.place(bounds[:-1])
    lengths: Sequence[int] = _distinct(counts).tolist()
    return tuple(Segments(length, table[counts == length]) for length in reversed(lengths))


def _whole_blocks(src: _Side, dst: _Side, tokens: range) -> bool:
    size = src.block_size
    starts = (tokens.start - src.tokens.start, tokens.start - dst.tokens.start)
    whole = not any(start % size for start in (*starts, len(tokens)))
    return whole and size == dst.block_size


def _sides(name: str, blocks: Blocks, block_size: int) -> tuple[_Side, ...]:
    tables = as_tables(blocks, name)
    if len(tables) == 1:
        return (_Side.of(name, tables[0], block_size),)
    return tuple(
        _Side.of(f"{name} of group {group}", table, block_size)
        for group, table in enumerate(tables)
    )


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
