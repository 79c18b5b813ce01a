"""The GPUs of this process, by the same kernels and copy engines that carry transfers."""

import mmap
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer import _core
from kvxfer.diagnose.figures import ENGINE, KERNEL
from kvxfer.diagnose.measure.node import PAGE_BYTES, Copy, Wrong
from kvxfer.diagnose.measure.pages import paged_plan, pattern_of
from kvxfer.errors import KvxferError, NotAvailable, TransferTimeout
from kvxfer.layout import CopyPlan
from kvxfer.transport.device_copy import DEFAULT_NUM_SMS
from kvxfer.transport.host_copy import plan_tables

_COPY_S = 20.0
_BULK_MAJOR = 9  # the compute capability of the first GPUs with bulk-asynchronous copies
_ALL_SMS = 0
_SLOT = 0
# A ring that no cache of the reader's keeps: each line is read once.
_RING_SLOTS = 8192
_RING_STRIDE_BYTES = 128
_RING_HOPS = 4096


class GpuMemory:
    """One GPU's two areas, and its copier. Other GPUs reach the areas by the same addresses.

    Attributes:
        device: CUDA index.
        source_address: of the source area.
        destination_address: of the destination area.
    """

    def __init__(self, device: int, area_bytes: int) -> None:
        """Allocate both areas.

        Raises:
            CudaError: the GPU has too little memory free.
        """
        board = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        num_slots = mmap.PAGESIZE // _core.CompletionBoard.SLOT_BYTES
        # The first attribute, so that it goes before the board that it writes to.
        self._copier = _core.DeviceCopier(device, board.ctypes.data, num_slots)
        self._board = board
        self._memory = _core.DeviceBuffer(device, 2 * area_bytes)
        self.device = device
        self.source_address = self._memory.address
        self.destination_address = self._memory.address + area_bytes
        self._sequence = 0
        is_bulk = _core.device_info(device).compute_major >= _BULK_MAJOR
        self._kernel = _core.CopyEngine.BULK if is_bulk else _core.CopyEngine.LOAD_STORE

    def copy(self, plan: CopyPlan, kind: str, *, times: int = 1) -> None:
        """Run one copy, several times over, and wait until all is visible.

        Raises:
            CudaError: it failed.
            TransferTimeout: it did not end in time.
        """
        engine, num_sms = self._kernel, DEFAULT_NUM_SMS
        if kind == ENGINE:
            engine = _core.CopyEngine.DMA
        elif kind == KERNEL:
            num_sms = _ALL_SMS
        tables = plan_tables(plan)
        for _ in range(times):
            self._sequence += 1
            self._copier.post(tables, _SLOT, self._sequence, num_sms, engine)
        if not self._copier.wait(_SLOT, self._sequence, _COPY_S):
            raise TransferTimeout(
                f"a copy of {plan.total_bytes} bytes did not end within {_COPY_S:g} s"
            )


class CudaNode:
    """GPUs that NVML numbers, with peer access wherever CUDA grants it."""

    def __init__(self, devices: Mapping[int, int], area_bytes: int, num_queued: int) -> None:
        """Allocate the areas and open peer access.

        Args:
            devices: NVML index -> CUDA index.
            area_bytes: of each area, a multiple of :data:`PAGE_BYTES`.
            num_queued: times that :meth:`run` runs each copy.

        Raises:
            CudaError: a GPU has too little memory, or refuses.
        """
        self.area_bytes = area_bytes
        self.num_queued = num_queued
        self.gpus = tuple(devices)
        self.memory = {gpu: GpuMemory(device, area_bytes) for gpu, device in devices.items()}
        self._peers: set[tuple[int, int]] = set()
        for gpu, device in devices.items():
            for other, other_device in devices.items():
                if gpu != other and _core.can_access_peer(device, other_device):
                    _core.enable_peer_access(device, other_device)
                    self._peers.add((gpu, other))

    def fill(self, gpu: int, seed: int) -> None:
        """Write the pattern over the whole source area."""
        memory = self.memory[gpu]
        pages = np.arange(self.area_bytes // PAGE_BYTES, dtype=np.int64)
        tables = pattern_of(memory.source_address, pages, pages, source=gpu, page_bytes=PAGE_BYTES)
        _core.pattern_fill_device(memory.device, tables, seed)

    def run(self, copies: Sequence[Copy]) -> float:
        """Run copies at once, a thread a GPU: the posting of one does not wait for that of others.

        Each runs several times over; the seconds are those of one time.

        Raises:
            NotAvailable: a kernel cannot reach the other GPU; the copy engine always can.
            CudaError: a copy failed.
            TransferTimeout: one did not end in time.
        """
        for copy in copies:
            other = copy.dst if copy.run_by == copy.src else copy.src
            if copy.kind != ENGINE and not self._reaches(copy.run_by, other):
                raise NotAvailable(f"GPU {copy.run_by} has no peer access to GPU {other}")
        plans = [self._plan(copy) for copy in copies]
        if len(copies) == 1:
            start = time.perf_counter()
            self.memory[copies[0].run_by].copy(plans[0], copies[0].kind, times=self.num_queued)
            return (time.perf_counter() - start) / self.num_queued
        queued = [
            (self.memory[copy.run_by], plan, copy.kind)
            for copy, plan in zip(copies, plans, strict=True)
        ]
        return _run_together(queued, self.num_queued) / self.num_queued

    def check(self, copy: Copy, seed: int) -> Wrong:
        """Compare with a kernel of the destination."""
        memory = self.memory[copy.dst]
        source, target = copy.pages()
        tables = pattern_of(
            memory.destination_address, target, source, source=copy.src, page_bytes=PAGE_BYTES
        )
        found = _core.pattern_check_device(memory.device, tables, seed)
        if not found.num_wrong_words:
            return Wrong(0)
        return Wrong(found.num_wrong_words, f"page {target[found.first_page]}")

    def read_latency(self, src: int, dst: int) -> tuple[float, Wrong]:
        """Follow a ring of indices through the other GPU's memory with one thread."""
        if not self._reaches(src, dst):
            raise NotAvailable(f"GPU {src} has no peer access to GPU {dst}")
        address = self.memory[dst].source_address
        ring, last = _ring()
        plan = CopyPlan.contiguous(ring.ctypes.data, address, ring.nbytes)
        self.memory[dst].copy(plan, ENGINE)
        found = _core.chase_pointers(
            self.memory[src].device, address, _RING_SLOTS, _RING_STRIDE_BYTES, _RING_HOPS
        )
        right = found.last_index == last
        wrong = Wrong(0) if right else Wrong(1, f"hop {_RING_HOPS} read {found.last_index}")
        return found.ns_per_hop, wrong

    def _reaches(self, src: int, dst: int) -> bool:
        return src == dst or (src, dst) in self._peers

    def _plan(self, copy: Copy) -> CopyPlan:
        src = self.memory[copy.src].source_address
        dst = self.memory[copy.dst].destination_address
        if copy.kind in (ENGINE, KERNEL):
            return CopyPlan.contiguous(src, dst + copy.first_dst_page * PAGE_BYTES, copy.num_bytes)
        source, target = copy.pages()
        return paged_plan(src, dst, source, target, PAGE_BYTES)


def _ring() -> tuple[NDArray[np.uint64], int]:
    """All slots in random order, and the index that the last hop reads."""
    order = np.random.default_rng(0).permutation(_RING_SLOTS - 1) + 1
    order = np.concatenate([np.zeros(1, np.int64), order])
    ring = np.zeros((_RING_SLOTS, _RING_STRIDE_BYTES // 8), np.uint64)
    ring[order, 0] = np.roll(order, -1)
    return ring, int(order[_RING_HOPS])


def _run_together(copies: Sequence[tuple[GpuMemory, CopyPlan, str]], times: int) -> float:
    """Seconds from when all threads are ready; a GPU's copies run in their order."""
    queues: dict[int, list[tuple[GpuMemory, CopyPlan, str]]] = {}
    for copy in copies:
        queues.setdefault(copy[0].device, []).append(copy)
    barrier = threading.Barrier(len(queues))
    starts: list[float] = []
    errors: list[KvxferError] = []

    def work(queue: list[tuple[GpuMemory, CopyPlan, str]]) -> None:
        barrier.wait(_COPY_S)
        starts.append(time.perf_counter())
        try:
            for memory, plan, kind in queue:
                memory.copy(plan, kind, times=times)
        except KvxferError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(queue,)) for queue in queues.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end = time.perf_counter()
    if errors:
        raise errors[0]
    return end - min(starts)
