"""What to measure: options from the user, and the cases they span."""

from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.layout import KVKind, KVLayout, load_model
from kvxfer.sweep.binding import LOOPBACK, Binding
from kvxfer.sweep.block_order import BlockOrder
from kvxfer.transport import Op
from kvxfer.tuning import Profile
from kvxfer.units import format_bytes

# Device memory is reached through one path; host memory of a peer through two.
HOST_MEMORY = ("shared", "private")
DEVICE_MEMORY = "device"
RAW_BLOCK_SIZE = 16
# SM budgets that stand for a number of the GPU at hand.
AUTO_SMS = 0
ALL_SMS = -1
# As many as a model of 32 layers has.
_RAW_PLANES = 64
_RAW_TOTAL_BYTES = {"host": 256 << 20, "device": 1 << 30}
_POOL_FACTOR = 2
# The pattern has whole elements of two bytes; a token of a raw page is a vector.
_ELEMENT_BYTES = 2
_PAGE_ALIGNMENT_BYTES = _ELEMENT_BYTES * RAW_BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """A layout to sweep.

    Attributes:
        name: for people.
        of: makes it of a model's usual layout.
        as_source: whether it is swept as a source too, not as a destination alone.
    """

    name: str
    of: Callable[[KVLayout], KVLayout]
    as_source: bool = True


@dataclass(frozen=True, slots=True)
class RankOptions:
    """What makes a sweep one of ranks, a process each.

    Attributes:
        tp: tensor-parallel sizes of source and destination.
        pp: pipeline-parallel sizes of the two.
        kv_heads: KV heads instead of the model's; empty = the model's.
        layouts: each with each, instead of the usual one on both sides; empty = that one.
    """

    tp: tuple[tuple[int, int], ...] = ((1, 1),)
    pp: tuple[tuple[int, int], ...] = ((1, 1),)
    kv_heads: tuple[int, ...] = ()
    layouts: tuple[LayoutChoice, ...] = ()


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """What the user asked for. Sequences are swept; see ``kvxfer sweep --help``.

    ``far_address`` is of an agent that somebody started, on whatever host; empty = the sweep starts
    its own. ``strict`` makes a row of another path than the expected one, or of none, an error.
    """

    transport: str = "auto"
    models: tuple[str, ...] = ("llama-3.1-8b",)
    tokens: tuple[int, ...] = (512, 2048, 8192)
    block_sizes: tuple[int, ...] = (16,)
    page_bytes: tuple[int, ...] = ()
    total_bytes: int | None = None
    block_orders: tuple[str, ...] = ("shuffled",)
    dtype: str = "bfloat16"
    order: str = "nhd"
    memory: tuple[str, ...] = HOST_MEMORY
    ops: tuple[str, ...] = ("put",)
    sms: tuple[int, ...] = (0,)
    engine: str = "auto"
    num_threads: int | None = None
    devices: tuple[int, int] | None = None
    iters: int | None = None
    warmup: int = 2
    seed: int = 0
    compute: tuple[str, str] | None = None
    ranks: RankOptions | None = None
    rank_devices: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    peers: tuple[str, ...] = ()
    far_address: str = ""
    binding: Binding = LOOPBACK
    strict: bool = False


@dataclass(frozen=True, slots=True)
class SweepCase:
    """One row: a request of one shape over one path.

    Attributes:
        transport: transport name.
        model: catalogue or file name; ``raw`` for a sweep of page sizes.
        num_tokens: tokens of the request.
        layout: one rank's cache.
        num_blocks: blocks of the request.
        pool_blocks: blocks of each side's cache; more than the request, as in an engine.
        memory: the peer's memory: ``shared``, ``private`` or ``device``.
        op: put (the source runs the copy) or get (the destination runs it).
        num_sms: SM budget; 0 on a CPU.
        peer: what moves the pages instead of kvxfer: a row of :mod:`kvxfer.sweep.peers`, or empty.
        tuning: the profile that both sides go by; None = each by its own.
    """

    transport: str
    model: str
    num_tokens: int
    layout: KVLayout
    num_blocks: int
    pool_blocks: int
    block_order: BlockOrder
    memory: str
    op: Op
    num_sms: int
    peer: str = ""
    tuning: Profile | None = None

    @property
    def mover(self) -> str:
        """What moves the pages, as the table calls it."""
        return f"{self.peer} (peer)" if self.peer else self.transport

    @property
    def num_pages(self) -> int:
        """Pages of the request over all planes."""
        return self.num_blocks * self.layout.num_planes

    @property
    def total_bytes(self) -> int:
        """Bytes of the request."""
        return self.num_pages * self.layout.page_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of one side's cache."""
        return self.pool_blocks * self.layout.block_bytes

    @property
    def label(self) -> str:
        """A short name for progress and errors."""
        return (
            f"{self.mover}/{self.memory} {self.op.value} {self.model} "
            f"{self.num_tokens} tokens, block {self.layout.block_size}"
        )


def expand_cases(options: SweepOptions, *, transport: str) -> list[SweepCase]:
    """Every combination of the swept options, for one resolved transport name.

    Raises:
        InvalidUsage: an unknown model, dtype, order, or a page size that is not a multiple of 32.
    """
    on_device = is_on_device(options, transport)
    shapes = _raw_shapes(options, on_device) if options.page_bytes else _model_shapes(options)
    memories = memories_of(options, transport)
    orders = [BlockOrder.parse(text) for text in options.block_orders]
    return [
        SweepCase(
            transport=transport,
            model=model,
            num_tokens=num_tokens,
            layout=layout,
            num_blocks=num_blocks,
            pool_blocks=pool_blocks(num_blocks, order),
            block_order=order,
            memory=memory,
            op=Op(op),
            num_sms=num_sms,
        )
        for memory in memories
        for op in options.ops
        for model, num_tokens, layout, num_blocks in shapes
        for order in orders
        for num_sms in (options.sms if on_device else (0,))
    ]


def memories_of(options: SweepOptions, transport: str) -> tuple[str, ...]:
    """The peer's memory, as swept over a transport.

    Raises:
        InvalidUsage: a memory that it does not move.
    """
    if is_on_device(options, transport):
        return (DEVICE_MEMORY,)
    unknown = set(options.memory) - set(HOST_MEMORY)
    if unknown:
        raise InvalidUsage(
            f"memory {', '.join(sorted(unknown))} over {transport}; use shared, private or both, "
            "or device alone"
        )
    return options.memory


def is_on_device(options: SweepOptions, transport: str) -> bool:
    """Whether pages lie in GPUs' memory."""
    return transport == "nvlink" or options.memory == (DEVICE_MEMORY,)


def pool_blocks(num_blocks: int, order: BlockOrder) -> int:
    """Blocks of the pool behind a request of ``num_blocks``: whole runs, and others' blocks."""
    run = max(order.run_blocks, 1)
    return _POOL_FACTOR * -(-num_blocks // run) * run


def require_checkable(layout: KVLayout, kind: type[InvalidUsage] | type[NotAvailable]) -> None:
    """Refuse a layout that the pattern cannot fill.

    Raises:
        InvalidUsage, NotAvailable: a vector has half an element of the pattern; as ``kind`` says.
    """
    if layout.vector_bytes % _ELEMENT_BYTES:
        raise kind(
            f"a head_dim of {layout.head_dim} in {layout.dtype} is {layout.vector_bytes} bytes, "
            f"which the sweep cannot check: use a head_dim of a multiple of {_ELEMENT_BYTES}, or a "
            "dtype of 2 bytes or 4"
        )


def _model_shapes(options: SweepOptions) -> list[tuple[str, int, KVLayout, int]]:
    shapes = []
    for name in options.models:
        model = load_model(name)
        for block_size in options.block_sizes:
            layout = model.kv_layout(
                block_size=block_size, dtype=options.dtype, order=options.order
            )
            require_checkable(layout, InvalidUsage)
            shapes += [
                (model.name, num_tokens, layout, layout.num_blocks(num_tokens))
                for num_tokens in options.tokens
            ]
    return shapes


def _raw_shapes(options: SweepOptions, on_device: bool) -> list[tuple[str, int, KVLayout, int]]:
    total = options.total_bytes or _RAW_TOTAL_BYTES["device" if on_device else "host"]
    shapes = []
    for page_bytes in options.page_bytes:
        if page_bytes % _PAGE_ALIGNMENT_BYTES:
            raise InvalidUsage(
                f"a page of {page_bytes} bytes; use a multiple of {_PAGE_ALIGNMENT_BYTES}"
            )
        if options.total_bytes is not None and total < page_bytes:
            raise InvalidUsage(
                f"a request of {format_bytes(total)} is less than a page of "
                f"{format_bytes(page_bytes)}; raise --total-bytes, or use smaller --page-bytes"
            )
        num_planes = min(_RAW_PLANES, max(1, total // page_bytes))
        layout = raw_layout(page_bytes, num_planes)
        num_blocks = max(1, total // layout.block_bytes)
        shapes.append(("raw", num_blocks * RAW_BLOCK_SIZE, layout, num_blocks))
    return shapes


def raw_layout(page_bytes: int, num_planes: int) -> KVLayout:
    """A cache of ``num_planes`` planes whose pages have ``page_bytes`` bytes, a multiple of 32."""
    return KVLayout(
        num_planes,
        1,
        head_dim=page_bytes // RAW_BLOCK_SIZE,
        dtype="uint8",
        block_size=RAW_BLOCK_SIZE,
        kv=KVKind.MLA,  # one plane a layer: a page is a page, neither of K nor of V
    )
