"""`memcpy-batch`: all pages in one call of ``cuMemcpyBatchAsync``, CUDA 12.8 and later."""

from collections.abc import Callable

import numpy as np

from kvxfer.layout import CopyPlan
from kvxfer.sweep.peers.cuda_driver import CudaStream
from kvxfer.sweep.peers.library import Ends, Mover, PeerLibrary, Row
from kvxfer.sweep.peers.pages import pages_of
from kvxfer.transport import Transfer


class MemcpyBatch(PeerLibrary):
    """A batch, which the driver spreads over its copy engines."""

    name = "memcpy-batch"
    memory = ("device",)

    def connect(self, ends: Ends, row: Row) -> Mover:
        """A mover by the copy engines of the near GPU."""
        return _BatchMover(ends)


class _BatchMover(Mover):
    def __init__(self, ends: Ends) -> None:
        self._page_bytes = ends.page_bytes
        self._stream = CudaStream(ends.near_device)
        self._name = self._stream.batch_name()
        self.settings = f"{self._name} by ctypes, one call, source order of the stream"

    def ready(self, plan: CopyPlan) -> Callable[[], Transfer]:
        pages = pages_of(plan, self._page_bytes)
        sizes = np.full(pages.src.size, pages.page_bytes, np.uint64)

        def start() -> Transfer:
            self._stream.copy_batch(pages.dst, pages.src, sizes)
            return self._stream.transfer(plan.total_bytes, self._name)

        return start

    def close(self) -> None:
        self._stream.close()
