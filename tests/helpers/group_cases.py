"""Cases of a request between caches whose layers form groups, and what must come of them.

The brute force is `kv_oracle`'s, layer by layer: each layer's tokens are written where the table of
its group says. Layers of different groups may lie in the same memory, in other blocks of it.
"""

from dataclasses import dataclass, field
from typing import Any

import kv_oracle
import numpy as np
from hypothesis import strategies as st
from kv_oracle import DST_FILLER, SRC_FILLER, Blocks, Bytes, RankCache
from numpy.typing import NDArray

from kvxfer.layout import BlockMap, BlockTable, BlockTables, KVLayout, KVShard, KVView

HEAD_DIM = 2


@dataclass(frozen=True)
class GroupSide:
    """One side: the group of each layer, its place in memory, and a table for each group."""

    groups: tuple[int, ...]
    slots: tuple[int, ...]
    tables: tuple[Blocks, ...]
    kind: str
    order: str
    num_blocks: int
    num_heads: int

    @property
    def block_size(self) -> int:
        return self.tables[0].block_size

    @property
    def cache(self) -> RankCache:
        """The memory, whose "layers" are the places of layers."""
        return RankCache(
            self.kind,
            self.order,
            range(max(self.slots) + 1),
            range(self.num_heads),
            self.block_size,
            HEAD_DIM,
            self.num_blocks,
            itemsize_bytes=2,
        )

    def layout(self, windows: tuple[int, ...]) -> KVLayout:
        return KVLayout(
            len(self.groups),
            self.num_heads,
            head_dim=HEAD_DIM,
            block_size=self.block_size,
            order=self.order,
            kv=self.kind,
            windows=windows,
            groups=self.groups,
        )

    def view(self, address: int, windows: tuple[int, ...]) -> KVView:
        cache = self.cache
        return KVView(
            KVShard(self.layout(windows)),
            self.num_blocks,
            addresses=cache.addresses(address)[list(self.slots)],
            block_stride_bytes=cache.stride_bytes("b"),
            token_stride_bytes=cache.stride_bytes("t"),
            head_stride_bytes=cache.stride_bytes("h"),
        )

    def block_tables(self) -> BlockTables:
        return BlockTables(BlockTable(list(one.ids), one.first_token) for one in self.tables)

    def write(self, memory: Bytes, content: NDArray[Any], tokens_of: dict[int, range]) -> None:
        """Write each layer's tokens into the blocks of its group."""
        cache = self.cache
        for layer, tokens in tokens_of.items():
            slot, blocks = self.slots[layer], self.tables[self.groups[layer]]
            of_layer = np.broadcast_to(content[layer], (len(cache.layers), *content[layer].shape))
            cache.write(memory, of_layer, blocks, {slot: tokens})


@dataclass(frozen=True)
class GroupCase:
    """``tokens`` of a request that ends at ``end``, moved from ``src`` to ``dst``."""

    windows: tuple[int, ...]
    src: GroupSide
    dst: GroupSide
    tokens: range
    end: int
    layers: tuple[int, ...] | None = None
    changes: dict[str, Any] = field(default_factory=dict)  # planted, for `block_map` alone

    def block_map(self) -> BlockMap:
        options: dict[str, Any] = {
            "src_blocks": self.src.block_tables(),
            "dst_blocks": self.dst.block_tables(),
            "tokens": [self.wanted(one) for one in self.dst.tables],
            "end": self.end,
        }
        return BlockMap(
            **(options | self.changes),
            src_block_size=self.src.block_size,
            dst_block_size=self.dst.block_size,
            src_num_blocks=self.src.num_blocks,
            dst_num_blocks=self.dst.num_blocks,
        )

    def wanted(self, table: Blocks) -> range:
        """What comes into a table: its side has what lies before it."""
        start = max(self.tokens.start, table.first_token)
        return range(min(start, self.tokens.stop), self.tokens.stop)

    def moved(self) -> dict[int, range]:
        """For each layer the tokens that move."""
        found = {}
        for layer in range(len(self.windows)) if self.layers is None else self.layers:
            window, table = self.windows[layer], self.dst.tables[self.dst.groups[layer]]
            tokens = [
                token
                for token in self.tokens
                if token >= table.first_token and (not window or token >= self.end - window)
            ]
            found[layer] = range(tokens[0], tokens[-1] + 1) if tokens else range(0)
        return found

    def content(self) -> NDArray[np.int64]:
        vectors = 1 if self.src.kind == "mla" else 2
        last = max(one.tokens.stop for side in (self.src, self.dst) for one in side.tables)
        return kv_oracle.codes(len(self.windows), vectors, last, self.src.num_heads, HEAD_DIM)

    def source_bytes(self) -> Bytes:
        """What the source's memory holds: in each table all tokens of its layers."""
        memory = self.src.cache.fresh(SRC_FILLER)
        held = {layer: self.src.tables[group].tokens for layer, group in enumerate(self.src.groups)}
        self.src.write(memory, self.content(), held)
        return memory

    def expected_bytes(self) -> Bytes:
        """What the destination's memory holds at the end."""
        memory = self.dst.cache.fresh(DST_FILLER)
        self.dst.write(memory, self.content(), self.moved())
        return memory


@st.composite
def group_cases(draw: st.DrawFn) -> GroupCase:
    """Cases of one to three groups a side; they shrink to one layer of one group."""
    num_layers = draw(st.integers(1, 4))
    windows = tuple(draw(st.sampled_from((0, 0, 1, 3, 7))) for _ in range(num_layers))
    start = draw(st.integers(0, 6))
    tokens = range(start, start + draw(st.integers(1, 9)))
    end = tokens.stop + draw(st.integers(0, 4))
    num_heads = draw(st.integers(1, 2))
    least = [max(start, end - window) if window else start for window in windows]
    sides = [draw(_sides(least, tokens.stop, num_heads, may_lack=may)) for may in (False, True)]
    layers = None
    if draw(st.booleans()):
        layers = tuple(sorted(draw(st.sets(st.integers(0, num_layers - 1), min_size=1))))
    return GroupCase(windows, *sides, tokens, end, layers)


@st.composite
def _sides(
    draw: st.DrawFn, least: list[int], stop: int, num_heads: int, *, may_lack: bool
) -> GroupSide:
    num_groups = draw(st.integers(1, 3))
    groups = tuple(draw(st.integers(0, num_groups - 1)) for _ in least)
    num_groups = max(groups) + 1
    slots = tuple(range(len(least)))
    if draw(st.booleans()):  # the first layers of all groups in one place, and so on
        slots = tuple(groups[:layer].count(group) for layer, group in enumerate(groups))
    size = draw(st.sampled_from((1, 2, 3, 4)))
    firsts, counts = [], []
    for group in range(num_groups):
        needed = min(
            (one for one, of in zip(least, groups, strict=True) if of == group), default=stop
        )
        first = draw(st.integers(0, needed))
        if may_lack:
            first = draw(st.sampled_from((first, needed, needed + 2)))
        firsts.append(first)
        counts.append(max(-(-(stop - first) // size), 0) + draw(st.integers(0, 1)))
    pool = draw(st.permutations(range(sum(counts) + 1)))
    ends = np.cumsum([0, *counts])
    tables = tuple(
        Blocks(tuple(pool[ends[group] : ends[group + 1]]), first, size)
        for group, first in enumerate(firsts)
    )
    kind, order = (
        draw(st.sampled_from(kv_oracle.KINDS[:3])),
        draw(st.sampled_from(kv_oracle.ORDERS)),
    )
    return GroupSide(groups, slots, tables, kind, order, len(pool), num_heads)
