"""RDMA devices from ``/sys/class/infiniband``, and how near each is to each GPU."""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from kvxfer.diagnose.facts import Gpu, Nic, NicPort, format_pci
from kvxfer.diagnose.inventory.sources import Sources
from kvxfer.diagnose.inventory.topo_text import Topology
from kvxfer.errors import InvalidUsage

_FOLDER = "/sys/class/infiniband"
_DEVICES = "/sys/bus/pci/devices"
_SOFTWARE = ("siw", "rxe")
_RATE = re.compile(r"\d{1,6}(?:\.\d{1,3})?")
_MAX_NICS = 1024


def nics_of(sources: Sources, gpus: Sequence[Gpu], topology: Topology) -> tuple[Nic, ...]:
    """All of them, the emulated ones marked; those that only a topology names have no ports.

    Raises:
        InvalidUsage: more than any node has.
    """
    names = sources.below(_FOLDER) or topology.nics
    if len(names) > _MAX_NICS:
        raise InvalidUsage(f"the capture tells of {len(names)} RDMA devices; at most {_MAX_NICS}")
    return tuple(_nic(sources, name, gpus, topology) for name in names)


def path_between(first: str, second: str) -> str:
    """How two PCI devices reach each other, from their folders below ``/sys/devices``.

    ``PIX``: through one switch at most; ``PXB``: through several; ``PHB``: through the host bridge;
    empty where they share none of these.
    """
    one, two = _parts(first), _parts(second)
    shared = 0
    while shared < min(len(one), len(two)) and one[shared] == two[shared]:
        shared += 1
    if shared == 0:
        return ""
    if shared == 1:
        return "PHB"
    return "PIX" if max(len(one), len(two)) - shared <= 2 else "PXB"


def _parts(target: str) -> list[str]:
    """``pci0000:15``, then bridge after bridge, then the device."""
    parts = list(PurePosixPath(target).parts)
    roots = [index for index, part in enumerate(parts) if part.startswith("pci")]
    return parts[roots[0] :] if roots else []


def _nic(sources: Sources, name: str, gpus: Sequence[Gpu], topology: Topology) -> Nic:
    folder = f"{_FOLDER}/{name}"
    pci = _pci_of(sources, folder)
    target = sources.links.get(folder, "")
    numa = sources.number(f"{folder}/device/numa_node")
    if numa is None and pci:
        numa = sources.number(f"{_DEVICES}/{pci}/numa_node")
    numa = None if numa is None or numa < 0 else numa
    return Nic(
        name=name,
        pci=pci,
        numa_node=numa,
        software=name.startswith(_SOFTWARE) or "/virtual/" in target,
        ports=tuple(_port(sources, folder, number) for number in sources.below(f"{folder}/ports")),
        paths={
            gpu.index: path
            for gpu in gpus
            if (path := _path(sources, name, pci, numa, gpu, topology))
        },
    )


def _path(
    sources: Sources, name: str, pci: str, numa: int | None, gpu: Gpu, topology: Topology
) -> str:
    told = topology.path(f"GPU{gpu.index}", name)
    if told:
        return told
    links = sources.links
    found = path_between(links.get(f"{_DEVICES}/{pci}", ""), links.get(f"{_DEVICES}/{gpu.pci}", ""))
    if found or numa is None or gpu.numa_node is None:
        return found
    return "NODE" if numa == gpu.numa_node else "SYS"


def _pci_of(sources: Sources, folder: str) -> str:
    for line in sources.files.get(f"{folder}/device/uevent", "").splitlines():
        key, _, value = line.partition("=")
        if key == "PCI_SLOT_NAME":
            return format_pci(value)
    return ""


def _port(sources: Sources, folder: str, number: str) -> NicPort:
    def field(name: str) -> str:
        return sources.files.get(f"{folder}/ports/{number}/{name}", "")

    rate = field("rate").split()
    return NicPort(
        number=int(number) if re.fullmatch(r"\d{1,4}", number) else 0,
        state=_after_colon(field("state")),
        physical_state=_after_colon(field("phys_state")),
        gbit_per_s=float(rate[0]) if rate and _RATE.fullmatch(rate[0]) else None,
        link_layer=field("link_layer"),
    )


def _after_colon(text: str) -> str:
    """``4: ACTIVE`` as ``active``."""
    return text.rpartition(":")[2].strip().lower()
