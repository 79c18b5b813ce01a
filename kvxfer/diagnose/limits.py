"""What the hardware allows, from links and rates read off it: no table of products.

The rate of a PCIe lane is of the PCI Express Base Specification: transfers a second times the
encoding (8b/10b for generations 1 and 2, 128b/130b to 5, 242 of 256 bytes of a flit from 6 on). The
headers of its packets take a tenth and more of that, which no limit here takes off.
"""

from msgspec.structs import replace

from kvxfer.diagnose.facts import Facts, PcieLink
from kvxfer.diagnose.figures import (
    ALL_PAIRS,
    ALL_TO_ONE,
    BOTH_WAYS,
    CROWD_KINDS,
    EVERY,
    HOST_DEVICE_KINDS,
    HOST_KINDS,
    LOCAL_MEMCPY,
    NIC_KINDS,
    PAIR_KINDS,
    Figure,
    Figures,
)

_GIGATRANSFERS_PER_S = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
_ENCODING = {1: 8 / 10, 2: 8 / 10, 3: 128 / 130, 4: 128 / 130, 5: 128 / 130, 6: 242 / 256}
_BITS = 8.0
Limit = tuple[float | None, str]
_UNKNOWN: Limit = (None, "")


def with_limits(facts: Facts, figures: Figures) -> Figures:
    """The same figures, each beside its limit."""
    limited = []
    for figure in figures.all:
        gb_per_s, source = limit_of(facts, figures, figure)
        limited.append(replace(figure, limit_gb_per_s=gb_per_s, limit_source=source))
    return replace(figures, all=limited)


def limit_of(facts: Facts, figures: Figures, figure: Figure) -> Limit:
    """GB/s of a figure's kind between its ends, and how that is known."""
    if figure.kind in PAIR_KINDS:
        one_way, source = pair_limit(facts, _index(figure.src), _index(figure.dst))
        if figure.kind == BOTH_WAYS and one_way is not None:
            return 2 * one_way, f"both directions of {source}"
        return one_way, source
    if figure.kind in CROWD_KINDS:
        return _crowd_limit(facts, figure)
    if figure.kind in HOST_DEVICE_KINDS:
        index = _index(figure.src if figure.src.startswith("gpu") else figure.dst)
        return pcie_limit(figures.busy_pcie.get(index) or facts.gpu(index).pcie)
    if figure.kind in NIC_KINDS:
        ports = [port for nic in facts.nics if nic.name == figure.src for port in nic.ports]
        rates = [port.gbit_per_s or 0.0 for port in ports if port.state == "active"]
        return (max(rates) / _BITS, "rate of the NIC's port") if any(rates) else _UNKNOWN
    if figure.kind in HOST_KINDS and figure.src == figure.dst:
        return _memcpy_reference(figures, figure.src)
    return _UNKNOWN


def _memcpy_reference(figures: Figures, node: str) -> Limit:
    """The fastest round on a NUMA node: measured, no limit, and never below what it is beside."""
    if figures.get(LOCAL_MEMCPY, node, node) is None:
        return _UNKNOWN
    found = [figures.get(kind, node, node) for kind in (LOCAL_MEMCPY, *HOST_KINDS)]
    rates = [one.best_gb_per_s or one.gb_per_s for one in found if one is not None and one.is_right]
    best = max((rate for rate in rates if rate), default=None)
    return (best, f"reference: fastest memcpy of {node}") if best else _UNKNOWN


def pair_limit(facts: Facts, src: int, dst: int) -> Limit:
    """One way between two GPUs: their NVLinks, else the narrower PCIe link."""
    path = facts.pair(src, dst)
    if path.num_nvlinks:
        return _nvlink_limit(facts, src, dst)
    limits = [pcie_limit(_best(facts.gpu(index).pcie)) for index in (src, dst)]
    known = [limit for limit in limits if limit[0] is not None]
    return min(known, key=lambda limit: limit[0] or 0.0) if known else _UNKNOWN


def pcie_limit(link: PcieLink) -> Limit:
    """One way of a PCIe link as it runs now."""
    if link.generation not in _GIGATRANSFERS_PER_S or not link.width:
        return _UNKNOWN
    lane = _GIGATRANSFERS_PER_S[link.generation] * _ENCODING[link.generation] / _BITS
    return lane * link.width, f"PCIe generation {link.generation}, {link.width} lanes"


def _best(link: PcieLink) -> PcieLink:
    """As it runs once it is busy: an idle one has a lower generation, never fewer lanes."""
    return replace(link, generation=link.best_generation or link.generation)


def _nvlink_limit(facts: Facts, src: int, dst: int) -> Limit:
    """The links that join the two, directly or through switches; the slower side counts."""
    sides = []
    for one, other in ((src, dst), (dst, src)):
        gpu, peer = facts.gpu(one), facts.gpu(other)
        links = [link for link in gpu.active_links if link.remote_pci == peer.pci and peer.pci]
        links = links or list(gpu.active_links)
        rates = [link.gb_per_s for link in links if link.gb_per_s is not None]
        if rates:
            sides.append((sum(rates), len(rates)))
    if not sides:
        return _UNKNOWN
    gb_per_s, count = min(sides)
    return gb_per_s, f"{count} active NVLinks x their rate"


def _crowd_limit(facts: Facts, figure: Figure) -> Limit:
    """The links of the one GPU that all share; of all GPUs where each sends."""
    indices = [gpu.index for gpu in facts.gpus or ()]
    if figure.kind == ALL_PAIRS:
        each = [_busiest(facts, index, indices) for index in indices]
        if any(limit is None for limit in each):
            return _UNKNOWN
        return sum(limit or 0.0 for limit in each), "links of all GPUs, each one way"
    one = figure.dst if figure.kind == ALL_TO_ONE else figure.src
    if one == EVERY:
        return _UNKNOWN
    limit = _busiest(facts, _index(one), indices)
    return (limit, f"links of {one}, one way") if limit is not None else _UNKNOWN


def _busiest(facts: Facts, index: int, indices: list[int]) -> float | None:
    """What one GPU can send, or take, of all others together."""
    gpu = facts.gpu(index)
    others = [other for other in indices if other != index]
    if others and all(facts.pair(index, other).num_nvlinks for other in others):
        rates = [link.gb_per_s for link in gpu.active_links if link.gb_per_s is not None]
        return sum(rates) if rates else None
    return pcie_limit(_best(gpu.pcie))[0]


def _index(name: str) -> int:
    return int(name.removeprefix("gpu"))
