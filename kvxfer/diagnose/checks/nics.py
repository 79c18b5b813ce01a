"""RDMA devices: up, near, and able to reach GPU memory."""

import errno
from collections import Counter
from collections.abc import Sequence

from kvxfer.diagnose.checks.base import (
    Absent,
    Answer,
    Check,
    Fine,
    answer,
    fail,
    listed,
    no_gpus,
    warn,
)
from kvxfer.diagnose.facts import Facts, Gpu, Nic
from kvxfer.diagnose.figures import Figures
from kvxfer.diagnose.result import Finding

_NEAR = ("PIX", "PXB", "PHB", "NODE", "SYS")
# Slower ones carry management or storage, not KV caches.
_DATA_GBIT_PER_S = 200.0
_PEERMEM = ("nvidia_peermem", "nv_peer_mem")
_NO_NICS = Absent("no RDMA device here; those that the kernel emulates do not count")


def _ports(facts: Facts, _: Figures) -> Answer:
    if not facts.hardware_nics:
        return _NO_NICS
    findings = []
    known = [(nic, port) for nic in facts.hardware_nics for port in nic.ports]
    if not known:
        return Absent("no state of any port is told")
    best: dict[str, float] = {}
    for _nic, port in known:
        best[port.link_layer] = max(best.get(port.link_layer, 0.0), port.gbit_per_s or 0.0)
    fast = {nic.name for nic in data_nics(facts.hardware_nics)}
    for nic, port in known:
        where = f"{nic.name} port {port.number}"
        if port.state != "active":
            state = f"{port.state}, {port.physical_state}".rstrip(", ")
            findings.append(
                warn(
                    where,
                    f"state {state}",
                    cause="no cable, no switch, or no subnet manager",
                    remedy="check cable and switch port; for InfiniBand the subnet manager",
                )
            )
        elif nic.name in fast and (port.gbit_per_s or 0.0) < best[port.link_layer]:
            findings.append(
                warn(
                    where,
                    f"{port.gbit_per_s:g} Gbit/s, others {best[port.link_layer]:g}",
                    cause="a degraded link: cable, lanes or the switch's port speed",
                    remedy="reseat or replace the cable; check the switch's port",
                )
            )
    return answer(findings, f"{len(known)} ports up")


def data_nics(nics: Sequence[Nic]) -> list[Nic]:
    """Those that KV caches should travel by: up, and fast, or the fastest that there are."""
    up = [nic for nic in nics if nic.active and not nic.software]
    return [nic for nic in up if nic.gbit_per_s >= _DATA_GBIT_PER_S] or up


def assign_nics(gpus: Sequence[Gpu], nics: Sequence[Nic]) -> dict[int, str]:
    """GPU -> its nearest NIC, the less used one of several that are equally near."""
    used: Counter[str] = Counter()
    found: dict[int, str] = {}
    for gpu in gpus:
        reachable = [nic for nic in nics if nic.paths.get(gpu.index) in _NEAR]
        if reachable:
            nearest = min(
                reachable, key=lambda nic: (_NEAR.index(nic.paths[gpu.index]), used[nic.name])
            )
            found[gpu.index] = nearest.name
            used[nearest.name] += 1
    return found


def _affinity(facts: Facts, _: Figures) -> Answer:
    if not facts.gpus:
        return no_gpus(facts)
    nics = data_nics(facts.hardware_nics)
    if not nics:
        return _NO_NICS if not facts.hardware_nics else Absent("no RDMA device is up")
    chosen = assign_nics(facts.gpus, nics)
    if not chosen:
        return Absent("how near NICs are to GPUs is not known")
    by_name = {nic.name: nic for nic in nics}
    findings = [
        warn(
            f"GPU {index}",
            f"its nearest NIC, {name}, is on another socket",
            cause="no NIC on the GPU's socket is up, or NICs are unevenly placed",
            remedy="use GPUs near a NIC for transfers between hosts; check NICs that are down",
        )
        for index, name in chosen.items()
        if by_name[name].paths.get(index) == "SYS"
    ]
    text = listed([f"GPU {index}: {name}" for index, name in chosen.items()], 8)
    return answer(findings, f"{text} (set UCX_NET_DEVICES to it for each rank)")


def _gpudirect(facts: Facts, _: Figures) -> Answer:
    if not facts.gpus:
        return no_gpus(facts)
    if not facts.hardware_nics:
        return _NO_NICS
    modules = facts.host.modules
    told = [gpu.dmabuf for gpu in facts.gpus if gpu.dmabuf is not None]
    dmabuf = all(told) if told else None
    peermem = None if modules is None else any(name in modules for name in _PEERMEM)
    refused = _refused(facts.host.rdma_errno, peermem, dmabuf)
    if refused is not None:
        return [refused]
    if peermem or dmabuf:
        return Fine("nvidia_peermem is loaded" if peermem else "GPU memory is exported as dma-buf")
    if peermem is None and dmabuf is None:
        return Absent("neither the kernel's modules nor dma-buf support are known")
    evidence = "nvidia_peermem is not loaded, and " + (
        "no dma-buf support" if dmabuf is False else "dma-buf support is not known"
    )
    finding = fail if dmabuf is False else warn
    return [
        finding(
            "GPUDirect RDMA",
            evidence,
            cause="NICs cannot reach GPU memory: transfers are staged through the host",
            remedy="modprobe nvidia_peermem, or use the open kernel modules, which have dma-buf",
        )
    ]


def _refused(code: int | None, peermem: bool | None, dmabuf: bool | None) -> Finding | None:
    """What an error of registering GPU memory with a NIC means."""
    if not code:
        return None
    cause, remedy = "the NIC's driver refused GPU memory", "see the kernel's log"
    if code == errno.EFAULT and not peermem and not dmabuf:
        cause, remedy = "nvidia_peermem is not loaded", "modprobe nvidia_peermem"
    elif code == errno.EFAULT and dmabuf:
        cause = "registered by address where the driver wants a dma-buf"
        remedy = "let the program export a dma-buf (perftest: --use_cuda_dmabuf)"
    elif code in (errno.EPROTONOSUPPORT, errno.EOPNOTSUPP):
        cause = "this GPU, kernel or NIC driver has no dma-buf for RDMA"
        remedy = "use kernel 5.12 or later with the open modules, or nvidia_peermem"
    name = errno.errorcode.get(code, "unknown")
    return fail(
        "GPUDirect RDMA",
        f"registering GPU memory failed with errno {code} ({name})",
        cause=cause,
        remedy=remedy,
    )


CHECKS = (
    Check("nic-ports", "are the NICs' ports up, and equally fast", _ports),
    Check("nic-affinity", "has each GPU a NIC near it", _affinity),
    Check("gpudirect", "can NICs reach GPU memory", _gpudirect),
)
