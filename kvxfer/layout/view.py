"""Where the elements of one KV cache lie: base addresses and strides."""

from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidUsage
from kvxfer.layout import _checks
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.layout.ranks import KVShard


@dataclass(frozen=True, slots=True)
class Strides:
    """Bytes from one entry of an axis to the next; the elements of a head are contiguous."""

    block_bytes: int
    token_bytes: int
    head_bytes: int
    kv_bytes: int
    layer_bytes: int

    @classmethod
    def dense(cls, layout: KVLayout, num_blocks: int) -> "Strides":
        """Those of one array without gaps, its axes in the order of `KVLayout.axes`."""
        sizes = layout.axis_sizes(num_blocks)
        strides, step = {}, layout.vector_bytes
        for axis in reversed(layout.axes):
            strides[f"{axis}_bytes"] = step
            step *= sizes[axis]
        return cls(**strides)


@dataclass(frozen=True, slots=True, eq=False)
class KVView:
    """The cache of one rank in one address space. It owns no memory.

    A *vector* is the ``head_dim`` elements of one head of one token. That of layer ``l`` (counted
    in this rank), ``v`` (0 = K or latent, 1 = V), block ``b``, slot ``t`` and head ``h`` (counted
    in this rank) is ``layout.vector_bytes`` bytes at ``addresses[l, v] + b * block_stride_bytes +
    t * token_stride_bytes + h * head_stride_bytes``.

    Args:
        shard: which part of which model's cache.
        num_blocks: blocks of the cache, 1 .. 2**32 - 1.
        addresses: uint64 ``[num_layers, num_vectors]`` of this rank. A read-only copy is kept.
        block_stride_bytes: from one block to the next.
        token_stride_bytes: from one slot of a block to the next.
        head_stride_bytes: from one head to the next.

    Compared by identity.

    Raises:
        InvalidUsage: wrong shape or dtype, strides by which vectors overlap, or a cache that runs
            past the end of the 64-bit address space.
    """

    shard: KVShard
    num_blocks: int
    _: KW_ONLY
    addresses: NDArray[np.uint64]
    block_stride_bytes: int
    token_stride_bytes: int
    head_stride_bytes: int

    def __post_init__(self) -> None:
        num_blocks = _checks.integer(
            "num_blocks", self.num_blocks, minimum=1, maximum=_checks.MAX_NUM_BLOCKS
        )
        object.__setattr__(self, "num_blocks", num_blocks)
        for name in ("block_stride_bytes", "token_stride_bytes", "head_stride_bytes"):
            stride = _checks.integer(
                name, getattr(self, name), minimum=1, maximum=_checks.ADDRESS_SPACE_BYTES - 1
            )
            object.__setattr__(self, name, stride)
        shape = (self.layout.num_layers, self.layout.num_vectors)
        object.__setattr__(self, "addresses", _checked_addresses(self.addresses, shape=shape))
        self._refuse_overlap()
        self._refuse_wraparound()

    @classmethod
    def dense(cls, shard: KVShard, num_blocks: int, address: int) -> "KVView":
        """The cache of one array without gaps at ``address``, in the order of `KVLayout.axes`.

        Raises:
            InvalidUsage: see the class.
        """
        num_blocks = _checks.integer(
            "num_blocks", num_blocks, minimum=1, maximum=_checks.MAX_NUM_BLOCKS
        )
        # Before numpy adds up, which would wrap around without a word.
        num_bytes = num_blocks * shard.layout.block_bytes
        last = _checks.ADDRESS_SPACE_BYTES - num_bytes
        if last < 0:
            raise InvalidUsage(f"a cache of {num_bytes} bytes passes the 64-bit address space")
        address = _checks.integer("address", address, minimum=0, maximum=last)
        layout, strides = shard.layout, Strides.dense(shard.layout, num_blocks)
        layers = np.arange(layout.num_layers, dtype=np.uint64) * np.uint64(strides.layer_bytes)
        vectors = np.arange(layout.num_vectors, dtype=np.uint64) * np.uint64(strides.kv_bytes)
        return cls(
            shard,
            num_blocks,
            addresses=np.uint64(address) + layers[:, None] + vectors,
            block_stride_bytes=strides.block_bytes,
            token_stride_bytes=strides.token_bytes,
            head_stride_bytes=strides.head_bytes,
        )

    @property
    def layout(self) -> KVLayout:
        """The shape of this rank's part."""
        return self.shard.layout

    @property
    def span_bytes(self) -> int:
        """Bytes from an entry of ``addresses`` to the end of the last vector that it leads to."""
        return self.layout.vector_bytes + sum(
            (count - 1) * stride for _, count, stride in self._axes()
        )

    def _axes(self) -> tuple[tuple[str, int, int], ...]:
        return (
            ("block", self.num_blocks, self.block_stride_bytes),
            ("token", self.layout.block_size, self.token_stride_bytes),
            ("head", self.layout.num_kv_heads, self.head_stride_bytes),
        )

    def _refuse_overlap(self) -> None:
        extent_bytes = self.layout.vector_bytes
        for name, count, stride in sorted(self._axes(), key=lambda axis: axis[2]):
            if count == 1:
                continue
            if stride < extent_bytes:
                raise InvalidUsage(
                    f"{name}_stride_bytes is {stride}, but what it steps over takes {extent_bytes} "
                    "bytes; strides must keep all vectors apart"
                )
            extent_bytes += (count - 1) * stride

    def _refuse_wraparound(self) -> None:
        address = int(self.addresses.max())
        if address + self.span_bytes > _checks.ADDRESS_SPACE_BYTES:
            raise InvalidUsage(
                f"the cache at {address:#x} spans {self.span_bytes} bytes and passes the end of "
                "the 64-bit address space; check its addresses, num_blocks and strides"
            )


def _checked_addresses(addresses: object, *, shape: tuple[int, int]) -> NDArray[np.uint64]:
    if not isinstance(addresses, np.ndarray) or addresses.dtype != np.uint64:
        found = addresses.dtype if isinstance(addresses, np.ndarray) else type(addresses).__name__
        raise InvalidUsage(f"addresses is {found}; use a numpy array of uint64")
    if addresses.shape != shape:
        raise InvalidUsage(
            f"addresses has shape {addresses.shape}; the layout has {shape[0]} layers of "
            f"{shape[1]} vectors, so use {shape}"
        )
    # A copy, because what was checked here must still hold when a plan uses it.
    copy: NDArray[np.uint64] = np.array(addresses)
    copy.setflags(write=False)
    return copy
