"""Host memory of each NUMA node to and from each GPU, page-locked and pageable."""

import mmap
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from kvxfer import _core
from kvxfer.diagnose.figures import ENGINE, PAGEABLE, PINNED, gpu_name, numa_name
from kvxfer.diagnose.inventory.nvml import read_pcie
from kvxfer.diagnose.measure.cuda_node import GpuMemory
from kvxfer.diagnose.measure.events import BusyPcie, Skipped, Task
from kvxfer.diagnose.measure.node import PAGE_BYTES, Wrong
from kvxfer.diagnose.measure.pages import pattern_of
from kvxfer.diagnose.measure.schedule import Schedule
from kvxfer.errors import CudaError
from kvxfer.layout import CopyPlan

# Numbers of sources in the pattern: above those of GPUs.
_HOST_SOURCE = 1 << 12


@contextmanager
def on_cpus(cpus: Sequence[int]) -> Iterator[None]:
    """Keep this thread, and those that it starts, on certain CPUs meanwhile.

    Memory that they touch first is then of those CPUs' NUMA node (Linux's default policy).
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class HostArea:
    """Host memory of one NUMA node, on whose CPUs it is filled and checked."""

    def __init__(self, num_bytes: int, num_threads: int) -> None:
        """Allocate it; call this on the node's CPUs."""
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pool = _core.WorkerPool(num_threads)
        self._pages = np.arange(num_bytes // PAGE_BYTES, dtype=np.int64)
        self.address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        self.num_bytes = num_bytes

    def fill(self, seed: int) -> None:
        """Write the pattern of ``seed``."""
        _core.pattern_fill_host(self._pool, self._tables(_HOST_SOURCE), seed)

    def check(self, gpu: int, seed: int) -> Wrong:
        """Compare all of it with what the source area of a GPU was filled by."""
        found = _core.pattern_check_host(self._pool, self._tables(gpu), seed)
        wrong = found.num_wrong_words
        return Wrong(wrong, f"page {found.first_page}" if wrong else "")

    def _tables(self, source: int) -> _core.PatternTables:
        return pattern_of(
            self.address, self._pages, self._pages, source=source, page_bytes=PAGE_BYTES
        )


def measure_host_device(memory: Mapping[int, GpuMemory], task: Task, schedule: Schedule) -> None:
    """Both directions, and the PCIe link as it is right after."""
    num_bytes = min(task.host_bytes, task.area_bytes)
    for numa, cpus in task.numa_cpus.items():
        with on_cpus(cpus):
            area = HostArea(num_bytes, task.num_threads)
            area.fill(0)  # its pages are placed by the first touch
            for kind in (PINNED, PAGEABLE):
                _measure_kind(kind, numa, area, memory, task, schedule)


def _measure_kind(
    kind: str,
    numa: int,
    area: HostArea,
    memory: Mapping[int, GpuMemory],
    task: Task,
    schedule: Schedule,
) -> None:
    if not schedule.has_time("host and GPUs"):
        return
    pinned: _core.PinnedRange | None = None
    if kind == PINNED:
        try:
            pinned = _core.PinnedRange(area.address, area.num_bytes)
        except CudaError as error:
            schedule.emit(Skipped("host and GPUs", f"memory cannot be page-locked: {error}"))
            return
    for gpu, one in memory.items():
        _measure_gpu(kind, numa, area, gpu, one, schedule, task.num_host_queued)
        link = read_pcie(task.pcis[gpu]) if gpu in task.pcis else None
        if kind == PINNED and link is not None:
            schedule.emit(BusyPcie(gpu, link))
    del pinned  # before the memory


def _measure_gpu(
    kind: str,
    numa: int,
    area: HostArea,
    gpu: int,
    memory: GpuMemory,
    schedule: Schedule,
    times: int,
) -> None:
    pages = np.arange(area.num_bytes // PAGE_BYTES, dtype=np.int64)

    def to_gpu() -> tuple[int, float, Wrong]:
        seed = schedule.next_seed()
        area.fill(seed)
        plan = CopyPlan.contiguous(area.address, memory.destination_address, area.num_bytes)
        seconds = _timed(memory, plan, times)
        tables = pattern_of(
            memory.destination_address, pages, pages, source=_HOST_SOURCE, page_bytes=PAGE_BYTES
        )
        found = _core.pattern_check_device(memory.device, tables, seed)
        first = f"page {found.first_page}" if found.num_wrong_words else ""
        return area.num_bytes, seconds, Wrong(found.num_wrong_words, first)

    def from_gpu() -> tuple[int, float, Wrong]:
        seed = schedule.next_seed()
        tables = pattern_of(memory.source_address, pages, pages, source=gpu, page_bytes=PAGE_BYTES)
        _core.pattern_fill_device(memory.device, tables, seed)
        plan = CopyPlan.contiguous(memory.source_address, area.address, area.num_bytes)
        seconds = _timed(memory, plan, times)
        return area.num_bytes, seconds, area.check(gpu, seed)

    schedule.measure((kind, numa_name(numa), gpu_name(gpu)), to_gpu)
    schedule.measure((kind, gpu_name(gpu), numa_name(numa)), from_gpu)


def _timed(memory: GpuMemory, plan: CopyPlan, times: int) -> float:
    """Seconds of one time."""
    start = time.perf_counter()
    memory.copy(plan, ENGINE, times=times)
    return (time.perf_counter() - start) / times
