"""Layouts and ranks as they travel, and whether the caches of two endpoints can be joined."""

from dataclasses import asdict

import msgspec

from kvxfer.control import LayoutSpec, RankSpec
from kvxfer.errors import InvalidUsage, LayoutMismatch, ProtocolMismatch
from kvxfer.layout import KVLayout, KVShard, ToFp8, TPLayout, require_compatible


def layout_spec(layout: KVLayout) -> LayoutSpec:
    """A layout as it travels."""
    return LayoutSpec(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        block_size=layout.block_size,
        order=layout.order.value,
        kv=layout.kv.value,
        windows=list(layout.windows),
        groups=list(layout.groups),
    )


def rank_spec(rank: TPLayout) -> RankSpec:
    """A rank as it travels."""
    return RankSpec(**asdict(rank))


def shard_of(layout: LayoutSpec, rank: RankSpec) -> KVShard:
    """The part of a model's cache that a peer says it has.

    Raises:
        ProtocolMismatch: there is no such layout, or no such rank of it.
    """
    try:
        return KVShard(
            KVLayout(**msgspec.structs.asdict(layout)), TPLayout(**msgspec.structs.asdict(rank))
        )
    except InvalidUsage as error:
        raise ProtocolMismatch(f"the peer's layout or rank cannot be: {error}") from error


def require_joinable(near: KVLayout, far: KVLayout, convert: ToFp8 | None) -> None:
    """Check that a put from ``near`` to ``far`` or a get back is possible.

    Raises:
        LayoutMismatch: neither is; names the first field that forbids a put, and both values.
    """
    try:
        require_compatible(near, far, convert)
    except LayoutMismatch as error:
        try:
            require_compatible(far, near, convert)
        except LayoutMismatch:
            raise error from None
