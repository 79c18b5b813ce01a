"""What a KV cache looks like: sizes and the order of its axes, no addresses."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
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
    """One plane a layer; a page holds K and then V of a block."""
    HEAD_PACKED = "head_packed"
    """One plane a layer; K and V of one head of one token lie side by side."""
    CHUNKED = "chunked"
    """One array of blocks; a block holds K of all layers, then V of all layers."""
    MLA = "mla"
    """One plane a layer; a page holds the latents of a block."""


# The axes of a cache from the slowest to the fastest; "inner" stands for tokens and heads in the
# order of `Order`, and the elements of a head follow at the end.
_AXES: Final[Mapping[KVKind, tuple[str, ...]]] = MappingProxyType(
    {
        KVKind.SPLIT: ("layer", "kv", "block", "inner"),
        KVKind.PACKED: ("layer", "block", "kv", "inner"),
        KVKind.HEAD_PACKED: ("layer", "block", "inner", "kv"),
        KVKind.CHUNKED: ("block", "kv", "layer", "inner"),
        KVKind.MLA: ("layer", "kv", "block", "inner"),
    }
)
_INNER: Final[Mapping[Order, tuple[str, str]]] = MappingProxyType(
    {Order.NHD: ("token", "head"), Order.HND: ("head", "token")}
)


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
        windows: for each layer the tokens that it looks back, 0 = all of them; empty = no layer
            slides.
        groups: for each layer the number of its group, from 0; empty = one group. Layers of one
            group have their tokens in the same blocks, those of different groups in different ones:
            a request has a block table for each group. Each side groups as it likes.

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
    windows: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            object.__setattr__(self, name, _checks.dimension(name, getattr(self, name)))
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        object.__setattr__(self, "order", _checks.member("order", self.order, of=Order))
        object.__setattr__(self, "kv", _checks.member("kv", self.kv, of=KVKind))
        windows = _checks.windows(self.windows, num_layers=self.num_layers)
        object.__setattr__(self, "windows", windows)
        groups = _checks.groups(self.groups, num_layers=self.num_layers)
        object.__setattr__(self, "groups", groups)
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
    def axes(self) -> tuple[str, ...]:
        """Names of the axes of the cache, slowest first: layer, kv, block, token, head.

        The ``head_dim`` elements of a head follow as the fastest axis.
        """
        axes = _AXES[self.kv]
        at = axes.index("inner")
        return (*axes[:at], *_INNER[self.order], *axes[at + 1 :])

    def axis_sizes(self, num_blocks: int) -> dict[str, int]:
        """Entries along each of `axes`, in a cache of ``num_blocks`` blocks."""
        return {
            "layer": self.num_layers,
            "kv": self.num_vectors,
            "block": num_blocks,
            "token": self.block_size,
            "head": self.num_kv_heads,
        }

    @property
    def num_groups(self) -> int:
        """Block tables of a request."""
        return max(self.groups, default=0) + 1

    def group_of(self, layer: int) -> int:
        """The group of a layer, both counted from 0."""
        return self.groups[layer] if self.groups else 0

    def window_of(self, layer: int) -> int:
        """The tokens that a layer looks back; 0 = all."""
        return self.windows[layer] if self.windows else 0

    def needed_by(self, layer: int, tokens: range) -> range:
        """The tokens of a request of ``tokens`` that a layer needs: all, or its window's."""
        window = self.window_of(layer)
        return range(max(tokens.start, tokens.stop - window), tokens.stop) if window else tokens

    def needed(self, tokens: range) -> tuple[range, ...]:
        """For each group the tokens of a request that some layer of it needs.

        A group that has no layers needs none.
        """
        if not self.groups and not self.windows:
            return (tokens,)
        starts = [tokens.stop] * self.num_groups
        for layer in range(self.num_layers):
            group = self.group_of(layer)
            starts[group] = min(starts[group], self.needed_by(layer, tokens).start)
        return tuple(range(start, tokens.stop) for start in starts)

    def needed_blocks(self, tokens: range) -> tuple[range, ...]:
        """For each group the blocks of a request that hold what it needs.

        Block ``i`` of a request has a slot for the tokens from ``i * block_size`` on.
        """
        size = self.block_size
        return tuple(
            range(one.start // size, -(-one.stop // size)) if one else range(0)
            for one in self.needed(tokens)
        )

    @property
    def num_vectors(self) -> int:
        """Vectors of one token and head in a layer: 2 (K and V), or 1 (the latent of MLA)."""
        return 1 if self.kv is KVKind.MLA else 2

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector: the elements of one head of one token."""
        return self.head_dim * self.itemsize_bytes

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def planes_per_layer(self) -> int:
        """Planes of one layer: 2 where a page is of K or of V alone, else 1."""
        return 2 if self.kv in (KVKind.SPLIT, KVKind.CHUNKED) else 1

    @property
    def num_planes(self) -> int:
        """Planes of all layers."""
        return self.num_layers * self.planes_per_layer

    @property
    def bytes_per_token_per_layer(self) -> int:
        """Bytes of one token in one layer, K and V together."""
        return self.num_vectors * self.num_kv_heads * self.vector_bytes

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
