"""Where the pages of one KV cache lie: base addresses of its planes and one stride."""

from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidUsage
from kvxfer.layout import _checks
from kvxfer.layout.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, eq=False)
class KVView:
    """The pages of one rank's cache in one address space. It owns no memory.

    Block ``b`` of plane ``p`` is ``layout.page_bytes`` bytes at
    ``plane_addresses[p] + b * block_stride_bytes``.

    Args:
        layout: shape of the cache of this rank.
        num_blocks: blocks of every plane, 1 .. 2**32 - 1.
        plane_addresses: uint64 ``[layout.num_planes]``, layer-major: layer 0 K, layer 0 V, layer 1
            K, ... A read-only copy is kept.
        block_stride_bytes: distance between the starts of neighbouring blocks in a plane; at least
            ``layout.page_bytes``, more where an engine interleaves planes.

    Compared by identity.

    Raises:
        InvalidUsage: wrong shape, dtype or stride, or a plane runs past the end of the 64-bit
            address space.
    """

    layout: KVLayout
    num_blocks: int
    _: KW_ONLY
    plane_addresses: NDArray[np.uint64]
    block_stride_bytes: int

    def __post_init__(self) -> None:
        num_blocks = _checks.integer(
            "num_blocks", self.num_blocks, minimum=1, maximum=_checks.MAX_NUM_BLOCKS
        )
        stride_bytes = _checks.integer(
            "block_stride_bytes",
            self.block_stride_bytes,
            minimum=self.layout.page_bytes,
            maximum=_checks.ADDRESS_SPACE_BYTES - 1,
        )
        object.__setattr__(self, "num_blocks", num_blocks)
        object.__setattr__(self, "block_stride_bytes", stride_bytes)
        addresses = _checked_addresses(self.plane_addresses, num_planes=self.layout.num_planes)
        object.__setattr__(self, "plane_addresses", addresses)
        self._refuse_wraparound()

    @property
    def plane_span_bytes(self) -> int:
        """Bytes from the start of a plane to the end of its last page."""
        return (self.num_blocks - 1) * self.block_stride_bytes + self.layout.page_bytes

    def _refuse_wraparound(self) -> None:
        plane = int(self.plane_addresses.argmax())
        address = int(self.plane_addresses[plane])
        if address + self.plane_span_bytes > _checks.ADDRESS_SPACE_BYTES:
            raise InvalidUsage(
                f"plane {plane} at {address:#x} spans {self.plane_span_bytes} bytes and passes the "
                "end of the 64-bit address space; check its address, num_blocks and "
                "block_stride_bytes"
            )


def _checked_addresses(addresses: object, *, num_planes: int) -> NDArray[np.uint64]:
    if not isinstance(addresses, np.ndarray) or addresses.dtype != np.uint64:
        found = addresses.dtype if isinstance(addresses, np.ndarray) else type(addresses).__name__
        raise InvalidUsage(f"plane_addresses is {found}; use a numpy array of uint64")
    if addresses.shape != (num_planes,):
        raise InvalidUsage(
            f"plane_addresses has shape {addresses.shape}; the layout has {num_planes} planes, so "
            f"use ({num_planes},)"
        )
    # A copy, because what was checked here must still hold when a plan uses it.
    copy: NDArray[np.uint64] = np.array(addresses)
    copy.setflags(write=False)
    return copy
