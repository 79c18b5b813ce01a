"""One rank's paged KV cache: arrays, their layout, and where each plane lies in them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvxfer.closing import Closing
from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout, KVView
from kvxfer.memory.buffer import Buffer, as_buffer
from kvxfer.memory.registration import Registration, register

# What the widest copies (16-byte words, bulk-asynchronous copies) ask of every page.
_ALIGNMENT_BYTES = 16


class KVCache(Closing):
    """The registered arrays of one rank's cache.

    Every array holds a whole number of planes, one behind the other, each plane
    ``num_blocks * page_bytes`` long. So these all fit: one array for the whole model; one array a
    layer (``[2, num_blocks, ...]`` where K and V are split, ``[num_blocks, ...]`` where packed or
    MLA); one array a plane, in the order layer 0 K, layer 0 V, layer 1 K, ...

    Attributes:
        layout: shape of the cache.
        view: plane addresses as this process sees them.
        registrations: one an array, in order.
        planes: (index of the array, byte offset in it) of every plane.
    """

    def __init__(self, layout: KVLayout, arrays: Any) -> None:
        """Register ``arrays`` (one array or a sequence of arrays) as a cache of ``layout``.

        Raises:
            InvalidUsage: the arrays are not contiguous, are of different devices or unequal
                sizes, too small for one block, or not aligned to 16 bytes.
            RegistrationError: they overlap memory registered otherwise.
        """
        buffers = [as_buffer(array) for array in _as_sequence(arrays)]
        _refuse_repeats(buffers)
        planes_per_array = _planes_per_array(layout, len(buffers))
        plane_bytes = _plane_bytes(layout, buffers, planes_per_array)
        self.layout = layout
        self.planes = [
            (index, plane * plane_bytes)
            for index in range(len(buffers))
            for plane in range(planes_per_array)
        ]
        addresses = [buffers[index].address + offset for index, offset in self.planes]
        self.view = KVView(
            layout,
            plane_bytes // layout.page_bytes,
            plane_addresses=np.array(addresses, dtype=np.uint64),
            block_stride_bytes=layout.page_bytes,
        )
        self.registrations: list[Registration] = []
        self._on_close: dict[object, Callable[[], None]] = {}
        try:
            for buffer in buffers:
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


def _refuse_repeats(buffers: Sequence[Buffer]) -> None:
    # The same range again would only share its registration, and two planes would be one.
    first: dict[int, int] = {}
    for index, buffer in enumerate(buffers):
        other = first.setdefault(buffer.address, index)
        if other != index:
            raise InvalidUsage(
                f"arrays {other} and {index} both start at {buffer.address:#x}; give each layer or "
                "plane memory of its own"
            )


def _planes_per_array(layout: KVLayout, num_arrays: int) -> int:
    allowed = sorted({1, layout.num_layers, layout.num_planes})
    if num_arrays not in allowed:
        raise InvalidUsage(
            f"{num_arrays} arrays for {layout.num_layers} layers of {layout.num_planes} planes; "
            f"pass {', '.join(map(str, allowed))} (whole model, one a layer, one a plane)"
        )
    return layout.num_planes // num_arrays


def _plane_bytes(layout: KVLayout, buffers: Sequence[Buffer], planes_per_array: int) -> int:
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
    plane_bytes, rest = divmod(first.num_bytes, planes_per_array)
    if rest or plane_bytes % layout.page_bytes or plane_bytes == 0:
        raise InvalidUsage(
            f"an array of {first.num_bytes} bytes is not {planes_per_array} planes of whole pages; "
            f"make it a multiple of {planes_per_array * layout.page_bytes} bytes "
            f"({layout.page_bytes} a page)"
        )
    return plane_bytes
