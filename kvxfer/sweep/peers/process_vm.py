"""`process-vm`: the kernel copies between two processes, one iovec a page."""

import ctypes
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import PeerLost, TransferFailed
from kvxfer.layout import CopyPlan
from kvxfer.sweep.peers.library import HOST, Ends, Mover, PeerLibrary, Row
from kvxfer.sweep.peers.pages import Addresses, pages_of
from kvxfer.sweep.peers.threads import Threads, parts_of
from kvxfer.transport import Op, Transfer
from kvxfer.transport.base import FinishedTransfer

_IOV_MAX = 1024


class ProcessVm(PeerLibrary):
    """``process_vm_writev`` and ``process_vm_readv``."""

    name = "process-vm"
    memory = HOST

    def connect(self, ends: Ends, row: Row) -> Mover:
        """A mover by system calls."""
        return _ProcessVmMover(ends)


class _ProcessVmMover(Mover):
    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._pid = int(ends.contact)
        put = ends.op is Op.PUT
        self._path = "process_vm_writev" if put else "process_vm_readv"
        # use_errno: the number of a thread's own call
        self._call = getattr(ctypes.CDLL(None, use_errno=True), self._path)
        self._call.argtypes = [
            ctypes.c_int,
            *([ctypes.c_void_p, ctypes.c_ulong] * 2),
            ctypes.c_ulong,
        ]
        self._call.restype = ctypes.c_ssize_t
        self._threads = Threads(ends.num_threads)
        self.num_threads = ends.num_threads
        self.settings = f"{_IOV_MAX} pages a call, {ends.num_threads} threads"

    def ready(self, plan: CopyPlan) -> Callable[[], Transfer]:
        ends, pages = self._ends, pages_of(plan, self._ends.page_bytes)
        near, far = (pages.src, pages.dst) if ends.op is Op.PUT else (pages.dst, pages.src)
        moved = np.uint64((ends.far_address - ends.mapped_address) % (1 << 64))
        local, remote = (_iovecs(side, pages.page_bytes) for side in (near, far + moved))
        # No more than an iovec array, and for each thread several.
        count = len(local)
        parts = parts_of(count, max(min(_IOV_MAX, count // (4 * self.num_threads)), 1))

        def start() -> Transfer:
            self._threads.run(lambda part: self._copy(local[part], remote[part]), parts)
            return FinishedTransfer(plan.total_bytes, self._path)

        return start

    def _copy(self, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> None:
        sizes = (local.ctypes.data, len(local), remote.ctypes.data, len(remote))
        copied = self._call(self._pid, *sizes, 0)
        if copied < 0:
            code = ctypes.get_errno()
            raise PeerLost(f"{self._path} of process {self._pid}: {os.strerror(code)}", code)
        wanted = len(local) * self._ends.page_bytes
        if copied != wanted:
            raise TransferFailed(f"{self._path} copied {copied} of {wanted} bytes")

    def close(self) -> None:
        self._threads.close()


def _iovecs(addresses: Addresses, num_bytes: int) -> NDArray[np.uint64]:
    iovecs = np.empty((addresses.size, 2), np.uint64)
    iovecs[:, 0] = addresses
    iovecs[:, 1] = num_bytes
    return iovecs
