"""PCIe links, and what stands in the way of traffic between devices."""

from kvxfer.diagnose.checks.base import (
    Absent,
    Answer,
    Check,
    Fine,
    answer,
    describe,
    fail,
    listed,
    no_gpus,
    warn,
)
from kvxfer.diagnose.facts import Facts
from kvxfer.diagnose.figures import Figures


def _width(facts: Facts, _: Figures) -> Answer:
    known = [gpu for gpu in facts.gpus or () if gpu.pcie.width and gpu.pcie.best_width]
    if not known:
        return no_gpus(facts) if not facts.gpus else Absent("the width of PCIe links is not told")
    return answer(
        [
            fail(
                describe(gpu),
                f"{gpu.pcie.width} of {gpu.pcie.best_width} PCIe lanes",
                cause="a slot, riser or contact with fewer working lanes",
                remedy="reseat the GPU or riser; check the slot's wiring",
            )
            for gpu in known
            if (gpu.pcie.width or 0) < (gpu.pcie.best_width or 0)
        ],
        f"{listed(sorted({f'{gpu.pcie.width} lanes' for gpu in known}))} on {len(known)} GPUs",
    )


def _speed(facts: Facts, figures: Figures) -> Answer:
    """Only right after copies: an idle GPU lowers its generation."""
    known = {
        index: link
        for index, link in figures.busy_pcie.items()
        if link.generation and link.best_generation
    }
    if not known:
        return no_gpus(facts) if not facts.gpus else Absent("not read while a GPU copied")
    return answer(
        [
            warn(
                describe(facts.gpu(index)),
                f"PCIe generation {link.generation} in a copy, {link.best_generation} at best",
                cause="signal quality, the slot, or a setting of the firmware",
                remedy="check the firmware's PCIe setting; reseat GPU or riser",
            )
            for index, link in known.items()
            if (link.generation or 0) < (link.best_generation or 0)
        ],
        f"full generation on {len(known)} GPUs while they copied",
    )


def _crosses_pcie(facts: Facts) -> str:
    """Which traffic between devices PCIe carries; empty = none."""
    pairs = [pair for pair in facts.pairs if pair.path and not pair.num_nvlinks]
    found = [f"{len(pairs)} pairs of GPUs"] if pairs else []
    if facts.gpus and facts.hardware_nics:
        found.append(f"{len(facts.hardware_nics)} NICs")
    return " and ".join(found)


def _acs(facts: Facts, _: Figures) -> Answer:
    ports = facts.host.acs_ports
    if not facts.gpus:
        return no_gpus(facts)
    if facts.host.hypervisor:
        return Absent("a virtual machine does not see the host's bridges")
    if ports is None:
        return Absent("unknown: the bridges' registers need root")
    carried = _crosses_pcie(facts)
    if not ports:
        return Fine("off on every bridge")
    if not carried:
        return Fine(f"on at {len(ports)} ports, which no traffic between devices crosses")
    return [
        warn(
            f"PCI bridges {listed(list(ports))}",
            f"Access Control Services are on at {len(ports)} ports; {carried} depend on PCIe",
            cause="ACS sends traffic between peers up to the root complex: slow, or hung",
            remedy="turn ACS off in the firmware, or by setpci at boot, on bare metal",
        )
    ]


def _iommu(facts: Facts, _: Figures) -> Answer:
    mode = facts.host.iommu
    if not facts.gpus:
        return no_gpus(facts)
    if mode is None:
        return Absent("unknown: no IOMMU groups were read")
    carried = _crosses_pcie(facts)
    if mode != "translated":
        return Fine("off" if mode == "off" else "on, passing addresses through")
    if not carried:
        return Fine("translates, but only NVLink joins devices here")
    return [
        warn(
            "IOMMU",
            f"it translates the GPUs' addresses; {carried} depend on PCIe",
            cause="peer traffic goes through the IOMMU: slow, and with some drivers wrong",
            remedy="boot with iommu=pt, or turn it off in the firmware, on bare metal",
        )
    ]


def _numa(facts: Facts, _: Figures) -> Answer:
    if not facts.gpus:
        return no_gpus(facts)
    if len(facts.host.numa_nodes) < 2:
        return Absent("one NUMA node, or none is told")
    unknown = [str(gpu.index) for gpu in facts.gpus if gpu.numa_node is None]
    if not unknown:
        return Fine("known for every GPU")
    return [
        warn(
            f"GPUs {listed(unknown)}",
            f"no NUMA node, though the host has {len(facts.host.numa_nodes)}",
            cause="the firmware or the hypervisor does not pass it on",
            remedy="pin processes by hand to the CPUs near their GPU; fix the firmware's tables",
        )
    ]


CHECKS = (
    Check("pcie-width", "have the PCIe links all their lanes", _width),
    Check("pcie-speed", "do the PCIe links reach their generation", _speed),
    Check("acs", "does ACS leave peer traffic alone", _acs),
    Check("iommu", "does the IOMMU leave peer traffic alone", _iommu),
    Check("numa", "is each GPU's NUMA node known", _numa),
)
