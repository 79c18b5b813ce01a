"""Nodes for tests of ``kvxfer diagnose``: facts and figures of healthy ones, and GPUs on a CPU.

``HostNode`` copies real bytes between arrays and checks them as GPUs would, on a clock of its own:
faults are planted in it, and nothing depends on how fast the machine is.
"""

from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np

from kvxfer.diagnose.facts import (
    Facts,
    Gpu,
    GpuPair,
    Host,
    NumaNode,
    NvLink,
    PcieLink,
)
from kvxfer.diagnose.figures import (
    ALL_PAIRS,
    ALL_TO_ONE,
    BOTH_WAYS,
    ENGINE,
    EVERY,
    KERNEL,
    LATENCY,
    LOCAL_MEMCPY,
    MEMCPY,
    ONE_TO_ALL,
    PAGEABLE,
    PAGED,
    PAGED_MEMCPY,
    PINNED,
    Figure,
    Figures,
)
from kvxfer.diagnose.measure.node import PAGE_BYTES, Copy, Wrong

LINK_GB_PER_S = 26.562
NVLINK = 18 * LINK_GB_PER_S
PCIE5 = PcieLink(generation=5, best_generation=5, width=16, best_width=16)
_RATES = {ENGINE: 396.0, KERNEL: 370.0, PAGED: 340.0}


def switched_node(num_gpus: int, num_links: int = 18) -> Facts:
    """GPUs on a baseboard with NVSwitches, as NVML tells of them."""
    links = tuple(
        NvLink(index=link, active=True, gb_per_s=LINK_GB_PER_S, remote="switch", num_errors=0)
        for link in range(num_links)
    )
    gpus = tuple(
        Gpu(
            index=index,
            name="NVIDIA H200",
            uuid=f"GPU-{index}",
            pci=f"0000:{0x1A + index:02x}:00.0",
            cuda_index=index,
            numa_node=int(index >= num_gpus / 2),
            pcie=PCIE5,
            links=links,
            mig=False,
            slowdown="",
        )
        for index in range(num_gpus)
    )
    pairs = tuple(
        GpuPair(
            src=src,
            dst=dst,
            path=f"NV{num_links}",
            nvlink="ok",
            read="ok",
            write="ok",
            cuda_access=True,
        )
        for src, dst in permutations(range(num_gpus), 2)
    )
    nodes = tuple(NumaNode(index=index, cpus=(index,), usable_cpus=(index,)) for index in (0, 1))
    return Facts(gpus=gpus, pairs=pairs, host=Host(numa_nodes=nodes, driver="580.95.05"))


def pcie_node(num_gpus: int, path: str = "SYS") -> Facts:
    """GPUs that PCIe alone joins."""
    facts = switched_node(num_gpus, num_links=0)
    pairs = tuple(
        GpuPair(src=one.src, dst=one.dst, path=path, read="ok", write="ok", cuda_access=True)
        for one in facts.pairs
    )
    return Facts(gpus=facts.gpus, pairs=pairs, host=facts.host)


def healthy_figures(num_gpus: int, rate: Callable[[Figure], Figure] = lambda one: one) -> Figures:
    """All figures of a switched node, each passed through ``rate``."""
    gpus = range(num_gpus)
    found: list[Figure] = []

    def add(kind: str, src: str, dst: str, **values: float) -> None:
        found.append(Figure(kind=kind, src=src, dst=dst, num_bytes=1 << 28, rounds=5, **values))  # type: ignore[arg-type]

    for src, dst in permutations(gpus, 2):
        # Rates of real pairs scatter by some tenths of a per cent.
        scatter = 1 + 0.002 * ((src * 7 + dst * 3) % 5 - 2)
        for kind, gb_per_s in _RATES.items():
            add(kind, f"gpu{src}", f"gpu{dst}", gb_per_s=gb_per_s * scatter)
        add(LATENCY, f"gpu{src}", f"gpu{dst}", latency_ns=1100 * scatter)
        if src < dst:
            add(BOTH_WAYS, f"gpu{src}", f"gpu{dst}", gb_per_s=760 * scatter)
    for gpu in gpus:
        add(ALL_TO_ONE, EVERY, f"gpu{gpu}", gb_per_s=385 + gpu / 10)
        add(ONE_TO_ALL, f"gpu{gpu}", EVERY, gb_per_s=388 + gpu / 10)
        for kind, gb_per_s in ((PINNED, 55.0), (PAGEABLE, 12.0)):
            for numa in (0, 1):
                add(kind, f"numa{numa}", f"gpu{gpu}", gb_per_s=gb_per_s - numa)
                add(kind, f"gpu{gpu}", f"numa{numa}", gb_per_s=gb_per_s - numa)
    add(ALL_PAIRS, EVERY, EVERY, gb_per_s=380.0 * num_gpus)
    for kind, gb_per_s in ((LOCAL_MEMCPY, 12.0), (MEMCPY, 11.5), (PAGED_MEMCPY, 10.0)):
        add(kind, "numa0", "numa0", gb_per_s=gb_per_s)
    busy = {gpu: PCIE5 for gpu in gpus}
    return Figures(all=[rate(one) for one in found], busy_pcie=busy)


class HostNode:
    """GPUs that are arrays.

    Args:
        num_gpus: how many.
        area_bytes: of each area.
        gb_per_s: (copy) -> the rate at which the clock advances.
        corrupt: (copy, bytes of the destination) -> plants wrong bytes in them.
    """

    def __init__(
        self,
        num_gpus: int,
        *,
        area_bytes: int = 64 * PAGE_BYTES,
        gb_per_s: Callable[[Copy], float] = lambda copy: 400.0,
        corrupt: Callable[[Copy, np.ndarray], None] = lambda copy, data: None,  # type: ignore[type-arg]
    ) -> None:
        self.gpus: Sequence[int] = range(num_gpus)
        self.area_bytes = area_bytes
        self.num_queued = 1
        self._gb_per_s = gb_per_s
        self._corrupt = corrupt
        shape = (num_gpus, area_bytes // PAGE_BYTES, PAGE_BYTES // 8)
        self._sources = np.zeros(shape, np.uint64)
        self._targets = np.zeros(shape, np.uint64)

    def fill(self, gpu: int, seed: int) -> None:
        self._sources[gpu] = self._pattern(gpu, seed)

    def run(self, copies: Sequence[Copy]) -> float:
        for copy in copies:
            source, target = copy.pages()
            self._targets[copy.dst][target] = self._sources[copy.src][source]
            self._corrupt(copy, self._targets[copy.dst])
        return max(copy.num_bytes / self._gb_per_s(copy) / 1e9 for copy in copies)

    def check(self, copy: Copy, seed: int) -> Wrong:
        source, target = copy.pages()
        wrong = self._targets[copy.dst][target] != self._pattern(copy.src, seed)[source]
        if not wrong.any():
            return Wrong(0)
        return Wrong(int(wrong.sum()), f"page {target[wrong.any(axis=1).argmax()]}")

    def read_latency(self, src: int, dst: int) -> tuple[float, Wrong]:
        return 1000.0, Wrong(0)

    def _pattern(self, gpu: int, seed: int) -> np.ndarray:  # type: ignore[type-arg]
        pages = np.arange(self._sources.shape[1], dtype=np.uint64)[:, None]
        words = np.arange(self._sources.shape[2], dtype=np.uint64)[None, :]
        key = np.uint64((seed << 20) + (gpu << 12))
        return (key + pages) * np.uint64(0x9E3779B97F4A7C15) + words
