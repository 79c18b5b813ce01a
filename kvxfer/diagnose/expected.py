"""What counts as good: the thresholds of all checks, each with its reason.

A fraction is of what the hardware allows (:mod:`kvxfer.diagnose.limits`) unless it says otherwise.
"""

import re

from kvxfer.diagnose.figures import LOCAL_MEMCPY, MEMCPY, PAGED_MEMCPY

# Packet headers leave 0.83 of 18 NVLinks of an H200 to a copy's payload (396 of 478 GB/s, by
# kvxfer sweep), and about as much of other generations.
NVLINK_GOOD, NVLINK_BAD = 0.75, 0.5
# Packet headers leave some 0.85 of a PCIe link to a copy from pinned memory; peer copies that cross
# a root complex carry less, by design of the processor.
PCIE_GOOD, PCIE_BAD = 0.7, 0.4
PEER_PCIE_GOOD, PEER_PCIE_BAD = 0.5, 0.25
# A kernel writes smaller packets than the copy engine: 0.94 of it was measured with all SMs of an
# H200, 0.86 in shuffled pages of 16 KiB with eight.
KERNEL_GOOD, PAGED_GOOD = 0.75, 0.6
# Both directions of a link together, of the two one after the other.
BOTH_WAYS_GOOD = 0.75
# Many GPUs at once, of the links that they share.
CROWD_GOOD, CROWD_BAD = 0.6, 0.3
# Two processes that share memory copy as fast as one; of the fastest round on their NUMA node,
# inside one process or between two.
MEMCPY_GOOD, PAGED_MEMCPY_GOOD = 0.5, 0.4
NIC_GOOD, NIC_BAD = 0.7, 0.4
# Of the same NIC's rate with host memory: below, the GPU's path to the NIC is at fault.
NIC_GPU_GOOD = 0.6
# Links repeat a packet now and then over months; more than this many times since the driver started
# is another matter.
LINK_ERRORS_TOLERATED = 100
# A figure this far above its limit cannot be: one of the two is wrong.
IMPOSSIBLE = 1.03
# An outlier differs from the median of the others by this fraction at least, and by so many times
# their median absolute deviation, scaled to a standard deviation.
OUTLIER_FRACTION, OUTLIER_DEVIATIONS = 0.1, 5.0
OUTLIER_BAD = 0.5
# Of an older figure: less is a change for the worse.
DRIFT_FRACTION = 0.1
# Copies on CPUs, which other programs use too: their best rounds halve from hour to hour.
HOST_DRIFT_FRACTION = 0.5


def memcpy_good(kind: str) -> float:
    """The fraction of the fastest round that the best of a kind of copy on CPUs should reach."""
    # The copy inside one process is what the others are judged by.
    return {LOCAL_MEMCPY: 0.0, MEMCPY: MEMCPY_GOOD, PAGED_MEMCPY: PAGED_MEMCPY_GOOD}[kind]


# NVLinks that a product has in use, from NVIDIA's data sheets (total NVLink bandwidth over that of
# one link). Parts that are not here are compared with the node's others alone.
_LINKS = (
    (r"H100 PCIe|H100 NVL", 12),
    (r"H800", 8),
    (r"GH200|H100|H200|H20\b", 18),
    (r"A800", 8),
    (r"A100", 12),
    (r"B200|B300|GB200|GB300", 18),
    (r"V100-SXM", 6),
)


def expected_links(name: str) -> int | None:
    """NVLinks that a GPU of this name has in use; None = not known."""
    for pattern, count in _LINKS:
        if re.search(pattern, name):
            return count
    return None


# Cards for a PCIe slot, whose links go through a bridge that is sold apart; a GH200 alone has
# nothing to link to.
_BRIDGED = re.compile(r"PCIe|\bNVL\b|A40\b|A30\b|A10\b|RTX|GH200", re.IGNORECASE)


def may_be_unlinked(name: str) -> bool:
    """Whether a GPU of this name may have no NVLink up by design."""
    return _BRIDGED.search(name) is not None
