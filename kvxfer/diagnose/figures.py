"""What was measured on a node: one record a figure.

GB/s are 1e9 bytes a second of payload. Every rate is of bytes that the destination compared, all of
them, with the pattern that the source was filled with; only those of perftest, which a capture may
hold, come from another tool.
"""

import msgspec

from kvxfer.diagnose.facts import PcieLink

# Kinds of figures between two GPUs (src, dst).
ENGINE = "copy engine"  # one contiguous copy
KERNEL = "kernel"  # the same by all SMs of the source
PAGED = "paged"  # shuffled 16 KiB pages, by as many SMs as a transfer takes by default
BOTH_WAYS = "both ways"  # two contiguous copies at once, one each way; the sum of both
LATENCY = "latency"  # of one read by the source, each waiting for the one before
PAIR_KINDS = (ENGINE, KERNEL, PAGED, BOTH_WAYS, LATENCY)
# Of many GPUs at once; the sum of all copies.
ALL_TO_ONE = "all to one"
ONE_TO_ALL = "one to all"
ALL_PAIRS = "all pairs"
CROWD_KINDS = (ALL_TO_ONE, ONE_TO_ALL, ALL_PAIRS)
# Between host memory of a NUMA node and a GPU.
PINNED = "pinned"
PAGEABLE = "pageable"
HOST_DEVICE_KINDS = (PINNED, PAGEABLE)
# Between two processes on CPUs of one or two NUMA nodes.
MEMCPY = "memcpy"
PAGED_MEMCPY = "paged memcpy"
LOCAL_MEMCPY = "memcpy in one process"
HOST_KINDS = (MEMCPY, PAGED_MEMCPY)
# Through a NIC: a loopback that was measured, or of perftest, whose bytes are not compared.
NIC_HOST = "NIC, host memory"
NIC_GPU = "NIC, GPU memory"
NIC_KINDS = (NIC_HOST, NIC_GPU)

EVERY = "all"


def gpu_name(index: int) -> str:
    """How a figure names a GPU of an NVML index."""
    return f"gpu{index}"


def numa_name(index: int) -> str:
    """How a figure names memory of a NUMA node."""
    return f"numa{index}"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement.

    Attributes:
        kind: one of the names above.
        src: ``gpu0``, ``numa0``, a NIC, or ``all``.
        dst: likewise.
        gb_per_s: the median round; None of a latency, or where it failed.
        best_gb_per_s: the fastest round.
        latency_ns: nanoseconds of one read.
        num_bytes: of a round.
        rounds: timed.
        limit_gb_per_s: what the hardware allows, from links and rates read off it; None = unknown.
        limit_source: how that is known.
        num_wrong: 8-byte words that were wrong, over all rounds.
        first_wrong: where the first of them was.
        error: why there is no figure.
    """

    kind: str
    src: str
    dst: str
    gb_per_s: float | None = None
    best_gb_per_s: float | None = None
    latency_ns: float | None = None
    num_bytes: int = 0
    rounds: int = 0
    limit_gb_per_s: float | None = None
    limit_source: str = ""
    num_wrong: int = 0
    first_wrong: str = ""
    error: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What is measured, without how it went."""
        return self.kind, self.src, self.dst

    @property
    def where(self) -> str:
        """In words."""
        return f"{self.kind} {self.src} -> {self.dst}"

    @property
    def is_right(self) -> bool:
        """Whether it was measured, and every byte was right."""
        return not self.error and not self.num_wrong

    @property
    def fraction_of_limit(self) -> float | None:
        """Of what the hardware allows, where both are known."""
        if self.gb_per_s is None or not self.limit_gb_per_s:
            return None
        return self.gb_per_s / self.limit_gb_per_s


class Figures(msgspec.Struct, kw_only=True):
    """All that was measured.

    Attributes:
        all: in the order of measuring.
        busy_pcie: NVML index -> PCIe link right after copies, when it is at full speed.
        skipped: what was not measured -> why.
    """

    all: list[Figure] = []
    busy_pcie: dict[int, PcieLink] = {}
    skipped: dict[str, str] = {}

    def of(self, *kinds: str) -> list[Figure]:
        """Those of certain kinds."""
        return [figure for figure in self.all if figure.kind in kinds]

    def get(self, kind: str, src: str, dst: str) -> Figure | None:
        """One of them."""
        found = [figure for figure in self.all if figure.key == (kind, src, dst)]
        return found[0] if found else None
