"""`memcpy`: one call a page, in memory that both processes map; ``cuMemcpyAsync`` on GPUs."""

import ctypes
from collections import deque
from collections.abc import Callable
from itertools import repeat

from kvxfer.layout import CopyPlan
from kvxfer.sweep.peers.cuda_driver import CudaStream
from kvxfer.sweep.peers.library import Ends, Mover, PeerLibrary, Row
from kvxfer.sweep.peers.pages import pages_of
from kvxfer.transport import Transfer
from kvxfer.transport.base import FinishedTransfer


class Memcpy(PeerLibrary):
    """A loop over pages."""

    name = "memcpy"
    memory = ("shared", "device")

    def connect(self, ends: Ends, row: Row) -> Mover:
        """A mover by the CPU, or by a GPU's copy engines."""
        return _HostMover(ends) if ends.near_device < 0 else _DeviceMover(ends)


class _HostMover(Mover):
    # One thread: two that take and drop Python's lock for every page hinder each other.
    num_threads = 1
    settings = "ctypes.memmove, one call a page, 1 thread"

    def __init__(self, ends: Ends) -> None:
        self._page_bytes = ends.page_bytes

    def ready(self, plan: CopyPlan) -> Callable[[], Transfer]:
        pages = pages_of(plan, self._page_bytes)
        src, dst = pages.src.tolist(), pages.dst.tolist()

        def start() -> Transfer:
            deque(map(ctypes.memmove, dst, src, repeat(pages.page_bytes)), maxlen=0)
            return FinishedTransfer(plan.total_bytes, "memmove into a shared segment")

        return start


class _DeviceMover(Mover):
    settings = "cuMemcpyAsync by ctypes, one call a page, one stream"

    def __init__(self, ends: Ends) -> None:
        self._page_bytes = ends.page_bytes
        self._stream = CudaStream(ends.near_device)

    def ready(self, plan: CopyPlan) -> Callable[[], Transfer]:
        pages = pages_of(plan, self._page_bytes)
        src, dst = pages.src.tolist(), pages.dst.tolist()

        def start() -> Transfer:
            self._stream.copy_each(dst, src, pages.page_bytes)
            return self._stream.transfer(plan.total_bytes, "cuMemcpyAsync")

        return start

    def close(self) -> None:
        self._stream.close()
