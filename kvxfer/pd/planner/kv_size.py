"""How many bytes the KV of a request takes, and in which runs it moves."""

from dataclasses import dataclass, replace

from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout
from kvxfer.layout.models import ModelShape


@dataclass(frozen=True, slots=True)
class KVSize:
    """The KV of one model under one dtype, over all ranks together.

    Args:
        model: a label.
        bytes_per_token: of all layers.
        page_bytes: of one block in one plane: what a copy of a whole block moves at once.
        block_tokens: tokens of a block; memory is taken in whole blocks.
        num_layers: that hold KV.
        num_kv_heads: over which ranks split a page.
        dtype: as `KVLayout.dtype`.
        max_tokens: most tokens of a request of the model, None = not known.
    """

    model: str
    bytes_per_token: int
    page_bytes: int
    block_tokens: int = 16
    num_layers: int = 1
    num_kv_heads: int = 1
    dtype: str = "bfloat16"
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("bytes_per_token", "page_bytes", "block_tokens", "num_layers", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise InvalidUsage(f"{name} is {getattr(self, name)}; use 1 or more")

    @classmethod
    def of(cls, shape: ModelShape, *, dtype: str = "bfloat16", block_tokens: int = 16) -> "KVSize":
        """The size of a model's cache; sliding layers keep all tokens."""
        layout: KVLayout = shape.kv_layout(block_size=block_tokens, dtype=dtype)
        return cls(
            shape.name,
            layout.bytes_per_token,
            layout.page_bytes,
            block_tokens,
            layout.num_layers,
            layout.num_kv_heads,
            layout.dtype,
            shape.max_tokens,
        )

    def request_bytes(self, num_tokens: int) -> int:
        """Bytes of the blocks that hold ``num_tokens``."""
        return -(-num_tokens // self.block_tokens) * self.block_tokens * self.bytes_per_token

    def run_bytes(self, src_tp: int, dst_tp: int) -> int:
        """Contiguous bytes that one copy moves between so many ranks, pages in the order NHD.

        A rank's page where both sides split the heads alike, else one token's heads of the rank
        that has fewer; heads that are fewer than ranks are replicated, not split.
        """
        parts = [min(tp, self.num_kv_heads) for tp in (src_tp, dst_tp)]
        if parts[0] == parts[1]:
            return max(1, self.page_bytes // parts[0])
        return max(1, self.page_bytes // self.block_tokens // max(parts))

    def narrowed(self, factor: float, dtype: str) -> "KVSize":
        """The same with elements of ``factor`` times the bytes."""
        return replace(
            self,
            bytes_per_token=max(1, round(self.bytes_per_token * factor)),
            page_bytes=max(1, round(self.page_bytes * factor)),
            dtype=dtype,
        )
