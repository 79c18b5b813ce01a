"""Cases of a request moved between two parallel layouts, for planner, host and GPU tests alike.

@given(reshard_cases())
def test_it(case):
    for rank in case.src.ranks: memory of case.src.num_bytes(rank), filled by source_bytes(rank)
    for rank in case.dst.ranks: destination_bytes(rank) before, expected_bytes(rank) after all
    plans: Route(case.src.view(rank, address), case.dst.view(...), **case.options).plan(
        case.block_map())
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import fp8_oracle
import kv_oracle
import numpy as np
from hypothesis import strategies as st
from kv_oracle import DST_FILLER, ITEMSIZE_BYTES, NO_GAPS, SRC_FILLER, Blocks, Bytes, RankCache
from numpy.typing import NDArray

from kvxfer.layout import BlockMap, BlockTable, KVLayout, KVShard, KVView, ToFp8, TPLayout

TP_SIZES = (1, 2, 3, 4, 6, 8, 16)
NUM_HEADS = (1, 2, 4, 8)
# The first are 16:64, 64:16 and 48:32 scaled down.
BLOCK_SIZES = ((2, 8), (8, 2), (6, 4), (4, 4), (1, 1), (3, 5), (1, 4), (7, 3))
# More pairs of ranks than this add time and no new case.
MAX_PAIRS = 256


@dataclass(frozen=True)
class Model:
    num_layers: int
    num_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    windows: tuple[int, ...] = ()
    mla: bool = False


@dataclass(frozen=True)
class Side:
    """One side's parallel layout, memory and block table.

    ``stages``: so many even pipeline stages, or stages that end at these layers.
    """

    model: Model
    dtype: str
    tp_size: int
    stages: int | tuple[int, ...]
    kind: str
    order: str
    block_size: int
    num_blocks: int
    block_ids: tuple[int, ...]
    first_token: int = 0
    gaps: tuple[int, ...] = NO_GAPS
    plane_seed: int = 0

    @property
    def num_stages(self) -> int:
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    @property
    def ranks(self) -> range:
        """All ranks, stage by stage."""
        return range(self.num_stages * self.tp_size)

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks(self.block_ids, self.first_token, self.block_size)

    @cached_property
    def caches(self) -> tuple[RankCache, ...]:
        """What each rank holds, by the oracle."""
        return tuple(
            RankCache(
                self.kind,
                self.order,
                layers,
                kv_oracle.heads_of(rank, self.tp_size, self.model.num_heads),
                self.block_size,
                self.model.head_dim,
                self.num_blocks,
                ITEMSIZE_BYTES[self.dtype],
                self.gaps,
                self.plane_seed,
            )
            for layers in kv_oracle.stage_layers(self.model.num_layers, self.stages)
            for rank in range(self.tp_size)
        )

    def num_bytes(self, rank: int) -> int:
        """Bytes of a rank's memory."""
        return self.caches[rank].num_bytes

    @cached_property
    def layout(self) -> KVLayout:
        """The whole model's layout on this side."""
        return KVLayout(
            self.model.num_layers,
            self.model.num_heads,
            head_dim=self.model.head_dim,
            dtype=self.dtype,
            block_size=self.block_size,
            order=self.order,
            kv=self.kind,
            windows=self.model.windows,
        )

    def shard(self, rank: int) -> KVShard:
        stage, tp_rank = divmod(rank, self.tp_size)
        layers = None
        if not isinstance(self.stages, int):
            layers = (0, *self.stages)[stage], self.stages[stage]
        return KVShard(
            self.layout,
            TPLayout(self.tp_size, tp_rank, pp_size=self.num_stages, pp_rank=stage, layers=layers),
        )

    def view(self, rank: int, address: int) -> KVView:
        """A rank's memory that begins at ``address``."""
        cache = self.caches[rank]
        return KVView(
            self.shard(rank),
            self.num_blocks,
            addresses=cache.addresses(address),
            block_stride_bytes=cache.stride_bytes("b"),
            token_stride_bytes=cache.stride_bytes("t"),
            head_stride_bytes=cache.stride_bytes("h"),
        )

    def table(self) -> BlockTable:
        """A request's blocks as the planner takes them."""
        return BlockTable(list(self.block_ids), self.first_token)

    def __str__(self) -> str:
        return (
            f"tp {self.tp_size} x stages {self.stages}, {self.kind} {self.order} {self.dtype}, "
            f"{len(self.block_ids)} blocks of {self.block_size} from token {self.first_token}"
        )


@dataclass(frozen=True)
class Case:
    """``tokens`` of a request moved from all ranks of ``src`` to all ranks of ``dst``.

    ``layers``: only these, or None. ``scales``: shape of the scales of a conversion to fp8: "one",
    "layer" or "head"; None = no conversion.
    """

    model: Model
    src: Side
    dst: Side
    tokens: range
    layers: tuple[int, ...] | None = None
    scales: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What `Route` and `plan` are told besides."""
        return {"layers": self.layers, "convert": self.conversion}

    def block_map(self) -> BlockMap:
        return BlockMap(
            self.src.table(),
            self.dst.table(),
            src_block_size=self.src.block_size,
            dst_block_size=self.dst.block_size,
            tokens=self.tokens,
            src_num_blocks=self.src.num_blocks,
            dst_num_blocks=self.dst.num_blocks,
        )

    def source_bytes(self, rank: int) -> Bytes:
        """What a source rank's memory holds: its part of all tokens of its blocks."""
        cache, blocks = self.src.caches[rank], self.src.blocks
        memory = cache.fresh(SRC_FILLER)
        everywhere = dict.fromkeys(range(self.model.num_layers), blocks.tokens)
        cache.write(memory, self._content, blocks, everywhere)
        return memory

    def destination_bytes(self, rank: int) -> Bytes:
        """What a destination rank's memory holds before."""
        return self.dst.caches[rank].fresh(DST_FILLER)

    def expected_bytes(self, rank: int) -> Bytes:
        """What a destination rank's memory must hold once all sources have sent."""
        memory = self.destination_bytes(rank)
        self.dst.caches[rank].write(memory, self._moved_content, self.dst.blocks, self._moved)
        return memory

    def expected_writes(self, rank: int) -> NDArray[np.bool_]:
        """Which bytes of a destination rank's memory must be written, each once."""
        return self.dst.caches[rank].written(self.dst.blocks, self._moved)

    @cached_property
    def conversion(self) -> ToFp8 | None:
        if self.scales is None:
            return None
        k_scale, v_scale = self._scales
        return ToFp8(k_scale, k_scale if self.model.mla else v_scale)

    @cached_property
    def _moved(self) -> dict[int, range]:
        layers = range(self.model.num_layers) if self.layers is None else self.layers
        return kv_oracle.moved_tokens(self.tokens, self.model.windows, list(layers))

    @cached_property
    def _content(self) -> NDArray[Any]:
        """Elements ``[layers, K|V, tokens, heads, dim]`` as the source stores them."""
        num_tokens = max(self.src.blocks.tokens.stop, self.dst.blocks.tokens.stop)
        made = kv_oracle.codes(
            self.model.num_layers,
            1 if self.model.mla else 2,
            num_tokens,
            self.model.num_heads,
            self.model.head_dim,
        )
        if self.scales is None:
            return made
        # As a number, a code would be tiny: spread them over what fp8 can tell apart.
        values = np.random.default_rng(7).permutation(made.reshape(-1)).reshape(made.shape)
        values = (values * (8.0 / max(1, values.size)) - 4.0).astype(np.float32)
        if self.model.dtype == "float16":
            return values.astype(np.float16).view(np.uint16)
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    @cached_property
    def _moved_content(self) -> NDArray[Any]:
        """The same as the destination stores them."""
        if self.scales is None:
            return self._content
        scales = np.stack([np.broadcast_to(_by_layer(one), self._whole) for one in self._scales])
        inverse = np.float32(1) / scales[: self._content.shape[1]]
        per_element = inverse.transpose(1, 0, 2)[:, :, None, :, None]
        return fp8_oracle.convert(self._content, self.model.dtype, per_element)

    @property
    def _whole(self) -> tuple[int, int]:
        return self.model.num_layers, self.model.num_heads

    @cached_property
    def _scales(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        shapes = {"one": (), "layer": self._whole[:1], "head": self._whole}
        # K and V need not have scales of one shape.
        k_shape = shapes[self.scales or "one"]
        random = np.random.default_rng(11)
        k_scale, v_scale = (random.uniform(0.02, 4, size) for size in (k_shape, shapes["layer"]))
        return np.asarray(k_scale, np.float32), np.asarray(v_scale, np.float32)

    def __str__(self) -> str:
        return (
            f"{self.model}\nsrc: {self.src}\ndst: {self.dst}\n"
            f"{self.tokens}, layers {self.layers}, scales {self.scales}"
        )


def _by_layer(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    return scales[:, None] if scales.ndim == 1 else scales


@dataclass(frozen=True)
class Limits:
    """What a strategy draws; narrower for suites whose cases are expensive."""

    tp_sizes: tuple[int, ...] = TP_SIZES
    num_heads: tuple[int, ...] = NUM_HEADS
    head_dims: tuple[int, ...] = (1, 2, 3, 8)
    num_layers: int = 5
    num_tokens: int = 14
    max_pairs: int = MAX_PAIRS
    gaps: bool = True
    block_sizes: tuple[tuple[int, int], ...] = BLOCK_SIZES
    conversions: tuple[str | None, ...] = (None, None, None, "one", "layer", "head")
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")


WIDE = Limits()


@st.composite
def reshard_cases(draw: st.DrawFn, limits: Limits = WIDE) -> Case:
    """Cases of every kind within ``limits``; they shrink to one rank, one layer and no tokens."""
    scales = draw(st.sampled_from(limits.conversions))
    model = draw(_models(limits, scales is not None))
    start = draw(st.integers(0, 9))
    tokens = range(start, start + draw(st.integers(0, limits.num_tokens)))
    sizes = draw(st.sampled_from(limits.block_sizes))
    src = draw(_sides(limits, model, model.dtype, sizes[0], tokens, limits.max_pairs))
    dst_dtype = model.dtype if scales is None else "fp8_e4m3"
    most_ranks = max(1, limits.max_pairs // len(src.ranks))
    # Equal layouts, of which whole pages move, are as likely as unequal ones.
    kinds, orders = (src.kind,) * 3 + kv_oracle.KINDS, (src.order,) * 2 + kv_oracle.ORDERS
    dst = draw(_sides(limits, model, dst_dtype, sizes[1], tokens, most_ranks, kinds, orders))
    layers = None
    if draw(st.integers(0, 3)) == 3:
        layers = tuple(sorted(draw(st.sets(st.integers(0, model.num_layers - 1)))))
    return Case(model, src, dst, tokens, layers, scales)


@st.composite
def _models(draw: st.DrawFn, limits: Limits, converting: bool) -> Model:
    num_layers = draw(st.integers(1, limits.num_layers))
    mla = draw(st.sampled_from((False, False, False, True)))
    windows: tuple[int, ...] = ()
    if draw(st.booleans()):
        windows = tuple(draw(st.sampled_from((0, 0, 1, 3, 6, 40))) for _ in range(num_layers))
    return Model(
        num_layers,
        1 if mla else draw(st.sampled_from(limits.num_heads)),
        draw(st.sampled_from(limits.head_dims)),
        draw(st.sampled_from([d for d in limits.dtypes if not converting or d != "float32"])),
        windows,
        mla,
    )


@st.composite
def _sides(
    draw: st.DrawFn,
    limits: Limits,
    model: Model,
    dtype: str,
    block_size: int,
    tokens: range,
    most_ranks: int,
    kinds: tuple[str, ...] = kv_oracle.KINDS,
    orders: tuple[str, ...] = kv_oracle.ORDERS,
) -> Side:
    stages = draw(_stages(model.num_layers, most_ranks))
    num_stages = stages if isinstance(stages, int) else len(stages)
    fitting = [size for size in limits.tp_sizes if size * num_stages <= most_ranks]
    # An engine may hold tokens before and after those that move.
    first_token = tokens.start - draw(st.integers(0, tokens.start))
    needed = -(-(tokens.stop - first_token) // block_size) + draw(st.integers(0, 1))
    num_blocks = max(1, needed) + draw(st.integers(0, 2))
    gaps, plane_seed = NO_GAPS, 0
    if limits.gaps and draw(st.sampled_from((False, False, True))):
        gaps = tuple(draw(st.integers(0, 2)) if axis != "l" else 0 for axis in "lkbthd")
        plane_seed = draw(st.integers(0, 5))
    return Side(
        model,
        dtype,
        draw(st.sampled_from(fitting)),
        stages,
        "mla" if model.mla else draw(st.sampled_from(kinds)),
        draw(st.sampled_from(orders)),
        block_size,
        num_blocks,
        tuple(draw(st.permutations(range(num_blocks)))[:needed]),
        first_token,
        gaps,
        plane_seed,
    )


@st.composite
def _stages(draw: st.DrawFn, num_layers: int, most_ranks: int) -> int | tuple[int, ...]:
    most = min(3, num_layers, most_ranks)
    if most == 1 or draw(st.booleans()):
        return draw(st.integers(1, most))
    ends = draw(st.sets(st.integers(1, num_layers - 1), min_size=0, max_size=most - 1))
    return (*sorted(ends), num_layers)
