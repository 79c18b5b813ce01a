"""What NIXL is told of memory."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HOST_DEVICE = -1


def segment_of(device: int) -> str:
    """NIXL's name for the memory of a CUDA device, or of the host (-1)."""
    return "DRAM" if device < 0 else "VRAM"


class Range(NamedTuple):
    """Memory of one process.

    Attributes:
        address: first byte.
        num_bytes: length.
        device: the CUDA device of that process that has it; -1 for host memory.
    """

    address: int
    num_bytes: int
    device: int = HOST_DEVICE


class Rows(NamedTuple):
    """Runs of one length in the memory of one process.

    Attributes:
        addresses: uint64 ``[n]``.
        num_bytes: of each.
        device: as of a range.
    """

    addresses: NDArray[np.uint64]
    num_bytes: int
    device: int = HOST_DEVICE

    @property
    def segment(self) -> str:
        """NIXL's name for that memory."""
        return segment_of(self.device)

    def table(self) -> NDArray[np.uint64]:
        """As NIXL takes them, uint64 ``[n, 3]``: address, length, device."""
        rows = np.empty((self.addresses.size, 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = self.addresses, self.num_bytes, max(self.device, 0)
        return rows
