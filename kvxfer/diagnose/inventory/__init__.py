"""What a node is: read live, captured to a folder, or taken from one; then made into facts."""

import math
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from kvxfer.diagnose.facts import Facts, Gpu, GpuPair
from kvxfer.diagnose.inventory.live import read_live
from kvxfer.diagnose.inventory.nics import nics_of
from kvxfer.diagnose.inventory.smi_text import join_links, parse_nvlink, parse_query
from kvxfer.diagnose.inventory.sources import (
    Nvml,
    Sources,
    read_folder,
    require_capture,
    write_folder,
)
from kvxfer.diagnose.inventory.system import host_of
from kvxfer.diagnose.inventory.topo_text import Topology, parse_p2p, parse_topo
from kvxfer.errors import InvalidUsage

_MAX_GPUS = 64

__all__ = [
    "Nvml",
    "Sources",
    "facts_of",
    "read_folder",
    "read_live",
    "require_capture",
    "write_folder",
]


def facts_of(sources: Sources) -> Facts:
    """Facts from sources: NVML where it answered, else the text of ``nvidia-smi``.

    Raises:
        InvalidUsage: they tell of more devices than any node has, or of one GPU twice.
    """
    topology = parse_topo(sources.texts.get("topo.txt", ""))
    nvml = sources.nvml
    gpus: tuple[Gpu, ...] | None
    if nvml is not None and nvml.gpus is not None:
        _require_few(max(len(nvml.gpus), math.isqrt(len(nvml.pairs))))
        gpus, pairs = nvml.gpus, nvml.pairs
        told = {"GPUs": "NVML"}
    else:
        gpus, told = _gpus_from_text(sources, topology)
        pairs = _pairs_from_text(sources, topology)
    if gpus is not None:
        _require_distinct(gpus)
        gpus = tuple(_with_numa(sources, gpu, topology) for gpu in gpus)
    told["NICs"] = "sysfs" if sources.below("/sys/class/infiniband") else "nvidia-smi topo"
    return Facts(
        gpus=gpus,
        pairs=pairs,
        nics=nics_of(sources, gpus or (), topology),
        host=host_of(sources),
        sources=told,
    )


def _text_source(sources: Sources, gpus: tuple[Gpu, ...] | None) -> str:
    if gpus is None:
        reason = sources.nvml.reason if sources.nvml is not None else "no capture of NVML"
        return f"nothing: {reason}"
    names = [name for name in ("query.txt", "nvlink.txt", "topo.txt") if name in sources.texts]
    return f"text of nvidia-smi: {', '.join(names)}"


def _gpus_from_text(
    sources: Sources, topology: Topology
) -> tuple[tuple[Gpu, ...] | None, dict[str, str]]:
    """The fullest text that there is, with links where they are told; and what that is."""
    linked = parse_nvlink(sources.texts.get("nvlink.txt", ""))
    _require_few(topology.num_gpus)
    _require_distinct(linked)
    queried = parse_query(sources.texts.get("query.txt", ""))
    gpus = queried or linked or [Gpu(index=index, name="") for index in topology.gpus]
    _require_few(len(gpus))
    joined = join_links(gpus, linked)
    found = tuple(gpus if joined is None else joined) or None
    told = {"GPUs": _text_source(sources, found)}
    if joined is None:
        told["NVLinks"] = (
            "nvlink.txt and query.txt tell of different GPUs; capture both on one node"
        )
    return found, told


def _pairs_from_text(sources: Sources, topology: Topology) -> tuple[GpuPair, ...]:
    status = parse_p2p(sources.texts.get("p2p.txt", ""))
    reads = parse_p2p(sources.texts.get("p2p-read.txt", ""))
    told = sorted({index for pair in {**status, **reads} for index in pair})
    _require_few(max(told, default=-1) + 1)
    indices = topology.gpus or told
    return tuple(
        GpuPair(
            src=src,
            dst=dst,
            path=topology.path(f"GPU{src}", f"GPU{dst}"),
            nvlink=status.get((src, dst)),
            read=reads.get((src, dst)),
        )
        for src in indices
        for dst in indices
        if src != dst
    )


def _require_few(count: int) -> None:
    if count > _MAX_GPUS:
        raise InvalidUsage(f"the capture tells of {count} GPUs; at most {_MAX_GPUS} are judged")


def _require_distinct(gpus: Sequence[Gpu]) -> None:
    """Two texts of one tool in a file tell of each GPU twice."""
    names = [f"GPU {gpu.index}" for gpu in gpus]
    names += [f"the GPU at {gpu.pci}" for gpu in gpus if gpu.pci]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InvalidUsage(
            f"the capture tells of {twice[0]} more than once; let each file hold one output of "
            "its tool"
        )


def _with_numa(sources: Sources, gpu: Gpu, topology: Topology) -> Gpu:
    """The NUMA node of the slot: -1 in sysfs, or no word at all, is unknown and never node 0."""
    if gpu.numa_node is not None:
        return gpu
    node = sources.number(f"/sys/bus/pci/devices/{gpu.pci}/numa_node")
    if node is None:
        node = topology.numa.get(f"GPU{gpu.index}")
    return replace(gpu, numa_node=None if node is None or node < 0 else node)
