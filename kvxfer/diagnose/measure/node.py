"""GPUs that copies can be run and checked on: what the measurements need, and no more.

The real ones are in :mod:`kvxfer.diagnose.measure.cuda_node`; tests have others, with planted
faults and a clock of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvxfer.diagnose.figures import ENGINE, PAGED

PAGE_BYTES = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Pages from the source area of one GPU to the destination area of another.

    Attributes:
        src: NVML index of the GPU that is read.
        dst: of the GPU that is written.
        run_by: of the GPU that copies.
        kind: ``copy engine``, ``kernel`` or ``paged``.
        num_pages: pages of :data:`PAGE_BYTES`.
        first_dst_page: where they begin in the destination area; they begin at 0 in the source's.
        seed: of the order of paged copies.
    """

    src: int
    dst: int
    run_by: int
    kind: str = ENGINE
    num_pages: int
    first_dst_page: int = 0
    seed: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied."""
        return self.num_pages * PAGE_BYTES

    def pages(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and destination page of each copied page; shuffled on either side where paged."""
        source = np.arange(self.num_pages, dtype=np.int64)
        target = source
        if self.kind == PAGED:
            random = np.random.default_rng(self.seed)
            source, target = random.permutation(source), random.permutation(source)
        return source, target + self.first_dst_page


@dataclass(frozen=True, slots=True)
class Wrong:
    """What a check of a destination found."""

    num_words: int
    first: str = ""


class GpuNode(Protocol):
    """GPUs of one node, each with a source area and a destination area of equal size."""

    @property
    def gpus(self) -> Sequence[int]:
        """NVML indices."""
        ...

    @property
    def area_bytes(self) -> int:
        """Bytes of an area."""
        ...

    @property
    def num_queued(self) -> int:
        """Times that :meth:`run` runs each copy."""
        ...

    def fill(self, gpu: int, seed: int) -> None:
        """Write the pattern of ``seed`` over the source area of a GPU.

        Every 8-byte word depends on seed, GPU, page and place in the page.
        """
        ...

    def run(self, copies: Sequence[Copy]) -> float:
        """Run copies at once, several times over; seconds of one time, until all are visible.

        Raises:
            KvxferError: one failed, or did not end in time.
        """
        ...

    def check(self, copy: Copy, seed: int) -> Wrong:
        """Have the destination compare all that a copy wrote with what its source was filled by."""
        ...

    def read_latency(self, src: int, dst: int) -> tuple[float, Wrong]:
        """Nanoseconds of one read by ``src`` of the memory of ``dst``, and whether it read right.

        Overwrites the source area of ``dst``.

        Raises:
            NotAvailable: ``src`` cannot read there.
        """
        ...
