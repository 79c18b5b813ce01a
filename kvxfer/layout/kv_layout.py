"""What one KV cache looks like, and which part of it one rank holds: sizes only, no addresses."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Final

from kvxfer.errors import InvalidUsage
from kvxfer.layout import _checks

DTYPE_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "fp8_e4m3": 1,
        "fp8_e5m2": 1,
        "int8": 1,
        "uint8": 1,
    }
)
"""Bytes of one element by canonical dtype name."""

_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "fp8_e4m3"}


class Order(str, Enum):
    """The order of tokens (N), heads (H) and head dimensions (D) inside a page."""

    NHD = "nhd"
    HND = "hnd"


class KVKind(str, Enum):
    """How K and V lie in a layer."""

    SPLIT = "split"
    """K and V are two planes a layer."""
    PACKED = "packed"
    """One plane a layer; a page holds K and V of a block."""
    MLA = "mla"
    """One plane a layer; a page holds the latents of a block."""


def canonical_dtype(name: str) -> str:
    """Return the canonical name of a dtype: ``bf16`` and ``BFloat16`` give ``bfloat16``.

    Raises:
        InvalidUsage: the name is unknown.
    """
    lowered = name.lower() if isinstance(name, str) else ""
    canonical = _ALIASES.get(lowered, lowered)
    if canonical not in DTYPE_BYTES:
        allowed = ", ".join([*DTYPE_BYTES, *_ALIASES])
        raise InvalidUsage(f"dtype is {name!r}; use one of {allowed}")
    return canonical


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a paged KV cache.

    A *plane* is one array of pages: a layer has two where K and V are split, else one. A *page* is
    one block of ``block_size`` tokens in one plane.

    Args:
        num_layers: layers that hold KV.
        num_kv_heads: KV heads a layer; 1 for MLA.
        head_dim: elements of one head of one token; for MLA the latent dimension.
        dtype: a name of `DTYPE_BYTES` or an alias (bf16, fp16, fp32, fp8).
        block_size: tokens a block.
        order: order of the axes inside a page.
        kv: how K and V lie in a layer.

    Strings are taken for ``order`` and ``kv``, as they come from the wire or a command line.

    Raises:
        InvalidUsage: a field is outside its limits; the message names field, value and limit.
    """

    num_layers: int
    num_kv_heads: int
    _: KW_ONLY
    head_dim: int
    dtype: str = "bfloat16"
    block_size: int = 16
    order: Order = Order.NHD
    kv: KVKind = KVKind.SPLIT

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            object.__setattr__(self, field, _checks.dimension(field, getattr(self, field)))
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        object.__setattr__(self, "order", _checks.member("order", self.order, of=Order))
        object.__setattr__(self, "kv", _checks.member("kv", self.kv, of=KVKind))
        if self.kv is KVKind.MLA and self.num_kv_heads != 1:
            raise InvalidUsage(
                f"num_kv_heads is {self.num_kv_heads}; MLA has one latent a token, so use 1 and "
                "give the latent dimension as head_dim"
            )
        if self.block_bytes > _checks.MAX_BLOCK_BYTES:
            raise InvalidUsage(
                f"one block takes {self.block_bytes} bytes, above the limit of "
                f"{_checks.MAX_BLOCK_BYTES}; check num_layers, num_kv_heads, head_dim "
                "and block_size"
            )

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def planes_per_layer(self) -> int:
        """Planes of one layer: 2 where K and V are split, else 1."""
        return 2 if self.kv is KVKind.SPLIT else 1

    @property
    def num_planes(self) -> int:
        """Planes of all layers."""
        return self.num_layers * self.planes_per_layer

    @property
    def bytes_per_token_per_layer(self) -> int:
        """Bytes of one token in one layer, K and V together."""
        num_vectors = 1 if self.kv is KVKind.MLA else 2
        return num_vectors * self.num_kv_heads * self.head_dim * self.itemsize_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one plane."""
        return self.block_size * self.bytes_per_token_per_layer // self.planes_per_layer

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all planes."""
        return self.num_planes * self.page_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * self.bytes_per_token_per_layer

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens; the last may be partly filled.

        Raises:
            InvalidUsage: ``num_tokens`` is no integer of 0 or more.
        """
        return -(-_checks.num_tokens(num_tokens) // self.block_size)

    def layer_bytes(self, num_tokens: int) -> int:
        """Bytes of exactly ``num_tokens`` tokens in one layer.

        Raises:
            InvalidUsage: ``num_tokens`` is no integer of 0 or more.
        """
        return _checks.num_tokens(num_tokens) * self.bytes_per_token_per_layer

    def request_bytes(self, num_tokens: int) -> int:
        """Bytes of exactly ``num_tokens`` tokens in all layers, not rounded up to blocks.

        Raises:
            InvalidUsage: ``num_tokens`` is no integer of 0 or more.
        """
        return _checks.num_tokens(num_tokens) * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class TPLayout:
    """One rank of a tensor-parallel and pipeline-parallel grid.

    Args:
        tp_size: ranks that share the heads.
        tp_rank: this rank among them, 0 .. tp_size - 1.
        pp_size: ranks that share the layers.
        pp_rank: this rank among them, 0 .. pp_size - 1.

    Raises:
        InvalidUsage: a field is outside its limits.
    """

    tp_size: int = 1
    tp_rank: int = 0
    _: KW_ONLY
    pp_size: int = 1
    pp_rank: int = 0

    def __post_init__(self) -> None:
        for axis in ("tp", "pp"):
            size = _checks.dimension(f"{axis}_size", getattr(self, f"{axis}_size"))
            rank = getattr(self, f"{axis}_rank")
            checked = _checks.integer(f"{axis}_rank", rank, minimum=0, maximum=size - 1)
            object.__setattr__(self, f"{axis}_size", size)
            object.__setattr__(self, f"{axis}_rank", checked)

    def heads_of(self, num_kv_heads: int) -> range:
        """The KV heads of this rank, a contiguous range that is never empty.

        Where ``tp_size`` does not divide the heads, neighbours share the head that the boundary
        cuts; where it exceeds them, heads are replicated.

        Raises:
            InvalidUsage: ``num_kv_heads`` is no integer of 1 or more.
        """
        heads = _checks.dimension("num_kv_heads", num_kv_heads)
        begin = self.tp_rank * heads // self.tp_size
        end = -(-(self.tp_rank + 1) * heads // self.tp_size)
        return range(begin, end)

    def layers_of(self, num_layers: int) -> range:
        """The layers of this rank, a contiguous range.

        The first ``num_layers % pp_size`` ranks hold one layer more than the rest.

        Raises:
            InvalidUsage: fewer layers than pipeline ranks.
        """
        layers = _checks.dimension("num_layers", num_layers)
        if layers < self.pp_size:
            raise InvalidUsage(
                f"pp_size is {self.pp_size} for {layers} layers; use at most one rank a layer"
            )
        share, extra = divmod(layers, self.pp_size)
        begin = self.pp_rank * share + min(self.pp_rank, extra)
        return range(begin, begin + share + (1 if self.pp_rank < extra else 0))

    def rank_layout(self, layout: KVLayout) -> KVLayout:
        """The layout of this rank's part of ``layout``; MLA latents are replicated.

        Raises:
            InvalidUsage: fewer layers than pipeline ranks.
        """
        replicated = layout.kv is KVKind.MLA
        heads = 1 if replicated else len(self.heads_of(layout.num_kv_heads))
        layers = len(self.layers_of(layout.num_layers))
        return replace(layout, num_layers=layers, num_kv_heads=heads)
