"""The rows of a sweep of ranks."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout, KVShard, ModelShape, ToFp8, TPLayout, load_model
from kvxfer.layout.conversion import DESTINATION, SOURCES
from kvxfer.sweep.block_order import BlockOrder
from kvxfer.sweep.cases import (
    LayoutChoice,
    RankOptions,
    SweepOptions,
    is_on_device,
    memories_of,
    pool_blocks,
    require_checkable,
)
from kvxfer.sweep.describe import describe_layout
from kvxfer.transport import Op
from kvxfer.tuning import Profile

_log = logging.getLogger(__name__)
_USUAL = LayoutChoice("", lambda layout: layout)


@dataclass(frozen=True, slots=True)
class RankSide:
    """One side of a transfer.

    Attributes:
        name: source or destination.
        layout: the whole model's cache as this side lays it out.
        tp: tensor-parallel ranks.
        pp: pipeline-parallel ranks.
        num_blocks: blocks of the request, the same for every rank.
        pool_blocks: blocks of each rank's cache.
    """

    name: str
    layout: KVLayout
    tp: int
    pp: int
    num_blocks: int
    pool_blocks: int

    @property
    def ranks(self) -> tuple[TPLayout, ...]:
        """All ranks, those of the first pipeline stage first."""
        return TPLayout.all_of(self.tp, self.pp)

    @property
    def shards(self) -> tuple[KVShard, ...]:
        """What each rank holds."""
        return tuple(KVShard(self.layout, rank) for rank in self.ranks)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all ranks' pools."""
        return self.pool_blocks * sum(shard.layout.block_bytes for shard in self.shards)


@dataclass(frozen=True, slots=True)
class RankCase:
    """One row: a request from the ranks of one side to those of the other.

    Attributes:
        transport: transport name.
        model: catalogue or file name.
        num_tokens: tokens of the request; exactly these are moved.
        src: the side that is read.
        dst: the side that is written.
        block_order: how a request's blocks lie in the pools.
        memory: memory of the ranks that do not copy: ``shared``, ``private`` or ``device``.
        op: put (the sources copy) or get (the destinations do).
        num_sms: SM budget of each copy; 0 on a CPU.
        tuning: the profile that all ranks go by; None = each by its own.
    """

    transport: str
    model: str
    num_tokens: int
    src: RankSide
    dst: RankSide
    block_order: BlockOrder
    memory: str
    op: Op
    num_sms: int
    tuning: Profile | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes written, over all destination ranks: a replica counts as often as it is held."""
        return sum(shard.layout.request_bytes(self.num_tokens) for shard in self.dst.shards)

    @property
    def convert(self) -> ToFp8 | None:
        """The conversion that the dtypes call for."""
        converts = self.src.layout.dtype in SOURCES and self.dst.layout.dtype == DESTINATION
        return ToFp8() if converts else None

    @property
    def label(self) -> str:
        """A short name for progress and errors."""
        pp = "" if self.src.pp == self.dst.pp == 1 else f" PP {self.src.pp}:{self.dst.pp}"
        sides = tuple(describe_layout(side.layout) for side in (self.src, self.dst))
        layouts = sides[0] if sides[0] == sides[1] else " -> ".join(sides)
        return (
            f"{self.transport}/{self.memory} {self.op.value} TP {self.src.tp}:{self.dst.tp}{pp} "
            f"{self.model}, {self.src.layout.num_kv_heads} KV heads, {self.num_tokens} tokens, "
            f"{layouts}"
        )


def expand_rank_cases(options: SweepOptions, *, transport: str) -> list[RankCase]:
    """Every combination of the swept options, for one resolved transport name.

    Raises:
        InvalidUsage: what one pair alone can be swept by, an unknown model, layout or memory, or
            more ranks than a model has layers for.
    """
    ranks = options.ranks or RankOptions()
    _require_of_ranks(options, transport)
    orders = [BlockOrder.parse(text) for text in options.block_orders]
    return [
        RankCase(
            transport=transport,
            model=model,
            num_tokens=num_tokens,
            src=_side("source", layouts[0], tp[0], pp[0], num_tokens, order),
            dst=_side("destination", layouts[1], tp[1], pp[1], num_tokens, order),
            block_order=order,
            memory=memory,
            op=Op(op),
            num_sms=num_sms,
        )
        for memory in memories_of(options, transport)
        for op in options.ops
        for model, layouts in _shapes(options, ranks)
        for num_tokens in options.tokens
        for order in orders
        for num_sms in (options.sms if is_on_device(options, transport) else (0,))
        for pp in ranks.pp
        for tp in ranks.tp
    ]


def _require_of_ranks(options: SweepOptions, transport: str) -> None:
    if transport == "loopback":
        raise InvalidUsage("loopback is one process, and each rank is one; use shm or nvlink")
    if options.page_bytes:
        raise InvalidUsage("a sweep of ranks is of models; leave --page-bytes")
    if options.compute is not None:
        raise InvalidUsage("--with-compute is of one pair; leave --tp, --pp and --layouts")


def _side(
    name: str, layout: KVLayout, tp: int, pp: int, num_tokens: int, order: BlockOrder
) -> RankSide:
    num_blocks = layout.num_blocks(num_tokens)
    side = RankSide(name, layout, tp, pp, num_blocks, pool_blocks(num_blocks, order))
    _ = side.shards  # refuses more stages than layers now
    return side


def _shapes(
    options: SweepOptions, ranks: RankOptions
) -> Iterator[tuple[str, tuple[KVLayout, KVLayout]]]:
    """Models and the layouts of their two sides."""
    choices = ranks.layouts or (_USUAL,)
    for name in options.models:
        model = load_model(name)
        _require_tp(ranks.tp, model)
        for block_size in options.block_sizes:
            usual = model.kv_layout(block_size=block_size, dtype=options.dtype, order=options.order)
            for heads in ranks.kv_heads or (usual.num_kv_heads,):
                layouts = _layouts(_with_heads(usual, heads, model), choices)
                if not ranks.layouts:
                    for layout in layouts:
                        require_checkable(layout, InvalidUsage)
                yield from (
                    (model.name, (src, dst))
                    for src, as_source in layouts.items()
                    if as_source
                    for dst in layouts
                )


def _layouts(usual: KVLayout, choices: tuple[LayoutChoice, ...]) -> dict[KVLayout, bool]:
    """The different layouts that a model can have, and whether each is swept as a source."""
    found: dict[KVLayout, bool] = {}
    for choice in choices:
        try:
            layout = choice.of(usual)
        except InvalidUsage as error:
            _log.warning("layout %s left out: %s", choice.name, error)
            continue
        found[layout] = found.get(layout, False) or choice.as_source
    if not found:
        raise InvalidUsage("no layout of --layouts suits the model; leave it, or name others")
    return found


def _with_heads(layout: KVLayout, heads: int, model: ModelShape) -> KVLayout:
    if model.kind == "mla" and heads != 1:
        raise InvalidUsage(
            f"--kv-heads {heads} for {model.name}, whose MLA has one latent; leave it"
        )
    if heads > model.num_attention_heads:
        raise InvalidUsage(f"--kv-heads: {heads}; {_most_heads(model)}")
    return replace(layout, num_kv_heads=heads)


def _require_tp(tp: Iterable[tuple[int, int]], model: ModelShape) -> None:
    # Ranks share the query heads, so more ranks than those cannot run.
    for pair in tp:
        if max(pair) > model.num_attention_heads:
            raise InvalidUsage(f"--tp: {pair[0]}:{pair[1]}; {_most_heads(model)}")


def _most_heads(model: ModelShape) -> str:
    most = model.num_attention_heads
    return f"{model.name} has {most} attention heads, so use 1 .. {most}"
