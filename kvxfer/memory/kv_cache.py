"""One rank's paged KV cache: arrays, their layout, and where each layer lies in them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvxfer.closing import Closing
from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout, KVShard, KVView, Strides, TPLayout
from kvxfer.memory.array_shape import require_fitting
from kvxfer.memory.buffer import Buffer, as_buffer
from kvxfer.memory.registration import Registration, register

# What the widest copies (16-byte words, bulk-asynchronous copies) ask of every page.
_ALIGNMENT_BYTES = 16
_ONLY_RANK = TPLayout()


class KVCache(Closing):
    """The registered arrays of one rank's cache.

    The arrays together are the cache without gaps, its axes in the order of `KVLayout.axes`, cut
    into equal arrays along the slowest of them. So these all fit: one array for all layers; one
    array a layer (``[2, num_blocks, ...]`` where K and V are split, ``[num_blocks, ...]`` where
    packed, head-packed or MLA); where K and V are split, one array a plane, in the order layer 0 K,
    layer 0 V, layer 1 K, ... A chunked cache is one array of blocks. Flat arrays are
    taken as bytes; what has two axes or more must have the shape of the layout.

    Layers of different groups may be given the same array: a request has other blocks of it in each
    group, as where an engine keeps one pool of pages for layers of several kinds.

    Attributes:
        shard: which part of which model this is.
        layout: the shape of this part, ``shard.layout``.
        view: addresses as this process sees them.
        registrations: one for each range of memory, in the order of the arrays.
        planes: (index of the range, byte offset in it) of every layer's vectors in order: layer 0
            K, layer 0 V, layer 1 K, ...; of every layer's latents for MLA.
    """

    def __init__(self, layout: KVLayout, arrays: Any, *, rank: TPLayout = _ONLY_RANK) -> None:
        """Register ``arrays`` (one array or a sequence of arrays) as a rank's part of a cache.

        Args:
            layout: the whole model's layout.
            arrays: memory of this rank's layers and heads.
            rank: which rank this is; by default the only one.

        Raises:
            InvalidUsage: the arrays are not contiguous, are of different devices or unequal
                sizes, too small for one block, not aligned to 16 bytes, or (where they have two
                axes or more) of another shape or item size than the layout.
            RegistrationError: they overlap memory registered otherwise.
        """
        given = _as_sequence(arrays)
        buffers = [as_buffer(array) for array in given]
        self.shard = KVShard(layout, rank)
        self.layout = own = self.shard.layout
        _require_grouping(own, len(buffers))
        ranges = _distinct(own, buffers)
        array_bytes = _common_bytes(buffers)
        num_blocks = _num_blocks(own, array_bytes, len(buffers))
        for array in given:
            require_fitting(own, array, array_bytes, num_arrays=len(given), num_blocks=num_blocks)
        strides = Strides.dense(own, num_blocks)
        found = [
            divmod(layer * strides.layer_bytes + vector * strides.kv_bytes, array_bytes)
            for layer in range(own.num_layers)
            for vector in range(own.num_vectors)
        ]
        addresses = [buffers[index].address + offset for index, offset in found]
        indices = {address: index for index, address in enumerate(ranges)}
        self.planes = [(indices[buffers[index].address], offset) for index, offset in found]
        self.view = KVView(
            self.shard,
            num_blocks,
            addresses=np.array(addresses, dtype=np.uint64).reshape(own.num_layers, own.num_vectors),
            block_stride_bytes=strides.block_bytes,
            token_stride_bytes=strides.token_bytes,
            head_stride_bytes=strides.head_bytes,
        )
        self.registrations: list[Registration] = []
        self._on_close: dict[object, Callable[[], None]] = {}
        try:
            for buffer in ranges.values():
                self.registrations.append(register(buffer))
        except BaseException:
            self.close()
            raise

    @property
    def num_blocks(self) -> int:
        """Blocks a plane holds."""
        return self.view.num_blocks

    @property
    def device(self) -> int:
        """CUDA device index, or -1 for host memory."""
        return self.registrations[0].buffer.device

    def require_live(self) -> None:
        """Check every array.

        Raises:
            RegistrationError: the cache was closed, or its memory was freed.
        """
        for registration in self.registrations:
            registration.require_live()

    def on_close(self, call: Callable[[], None]) -> Callable[[], None]:
        """Have ``call`` run when the cache is closed, before its registrations go.

        Returns:
            What takes that back, and lets go of ``call``; may be called more than once.
        """
        key = object()
        self._on_close[key] = call

        def cancel() -> None:
            self._on_close.pop(key, None)

        return cancel

    def close(self) -> None:
        """Give up the registrations; may be called more than once."""
        while self._on_close:
            self._on_close.popitem()[1]()
        for registration in self.registrations:
            registration.close()


def _as_sequence(arrays: Any) -> Sequence[Any]:
    return list(arrays) if isinstance(arrays, list | tuple) else [arrays]


def _distinct(layout: KVLayout, buffers: Sequence[Buffer]) -> dict[int, Buffer]:
    """The arrays by address, once those that start at one are found to be of different groups."""
    by_address: dict[int, Buffer] = {}
    had: dict[tuple[int, int], int] = {}
    for index, buffer in enumerate(buffers):
        group = layout.group_of(index * layout.num_layers // len(buffers))
        other = had.setdefault((buffer.address, group), index)
        if other != index:
            # Two layers or planes would be one: a request has one table for both.
            raise InvalidUsage(
                f"arrays {other} and {index} both start at {buffer.address:#x}; give each layer or "
                "plane of a group memory of its own"
            )
        by_address.setdefault(buffer.address, buffer)
    return by_address


def _require_grouping(layout: KVLayout, num_arrays: int) -> None:
    groupings = {1: "whole model"}
    if layout.axes[0] == "layer":
        groupings.setdefault(layout.num_layers, "one a layer")
    if layout.axes[:2] == ("layer", "kv"):
        groupings.setdefault(layout.num_planes, "one a plane")
    if num_arrays not in groupings:
        raise InvalidUsage(
            f"{num_arrays} arrays for {layout.num_layers} layers of {layout.num_planes} planes; "
            f"pass {', '.join(map(str, groupings))} ({', '.join(groupings.values())})"
        )


def _common_bytes(buffers: Sequence[Buffer]) -> int:
    """The size that all arrays have, once all are found to suit one cache."""
    first = buffers[0]
    for index, buffer in enumerate(buffers):
        if (buffer.kind, buffer.device) != (first.kind, first.device):
            raise InvalidUsage(
                f"array {index} is on {buffer.kind.value} {buffer.device}, array 0 on "
                f"{first.kind.value} {first.device}; keep one rank's cache on one device"
            )
        if buffer.num_bytes != first.num_bytes:
            raise InvalidUsage(
                f"array {index} has {buffer.num_bytes} bytes, array 0 has {first.num_bytes}; "
                "every layer holds the same number of blocks"
            )
        if buffer.address % _ALIGNMENT_BYTES:
            raise InvalidUsage(
                f"array {index} starts at {buffer.address:#x}, which is not a multiple of "
                f"{_ALIGNMENT_BYTES}; allocate it aligned (a view into another array may not be)"
            )
    return first.num_bytes


def _num_blocks(layout: KVLayout, array_bytes: int, num_arrays: int) -> int:
    block_bytes = layout.block_bytes // num_arrays  # of one block in one array
    if array_bytes % block_bytes:
        raise InvalidUsage(
            f"an array of {array_bytes} bytes is not {layout.num_planes // num_arrays} planes of "
            f"whole pages; make it a multiple of {block_bytes} bytes ({layout.page_bytes} a page)"
        )
    return array_bytes // block_bytes
