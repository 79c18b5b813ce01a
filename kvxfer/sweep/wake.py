"""Short copies, so that a round times threads and a GPU in use, not ones that slept."""

import numpy as np

from kvxfer import _core
from kvxfer.layout import CopyPlan
from kvxfer.transport import Link, Op

# A range of this many bytes for each thread is cut into work for all of them.
WAKE_BYTES = 256
_NUM_COPIES = 3


class Scratch:
    """Memory of a copy that brings nothing anywhere.

    Attributes:
        address: its first byte.
        num_bytes: its length.
    """

    def __init__(self, device: int, num_bytes: int) -> None:
        """Zeros on the host (device -1), or memory of a CUDA device."""
        self.num_bytes = num_bytes
        self.address: int
        self._owner: object
        if device < 0:
            host = np.zeros(num_bytes, np.uint8)
            self._owner, self.address = host, host.ctypes.data
        else:
            buffer = _core.DeviceBuffer(device, num_bytes)
            self._owner, self.address = buffer, buffer.address


def run_wake(link: Link, plan: CopyPlan, op: Op, timeout_s: float) -> None:
    """Run ``plan`` a few times, one after the other."""
    for _ in range(_NUM_COPIES):
        link.post(plan, op).wait(timeout_s)
