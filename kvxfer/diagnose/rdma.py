"""What RDMA needs of this host, and what to do about what is missing.

A pure reading of facts: those of the inventory (``/sys/class/infiniband``, the kernel's modules,
dma-buf of the GPUs), and those below, which are of this process.
"""

import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvxfer.diagnose.facts import Facts, Nic
from kvxfer.errors import NotAvailable
from kvxfer.transport.network_libraries import NetworkLibrary, nixl_library, ucx_library
from kvxfer.units import format_bytes

_PEERMEM = {"nvidia_peermem", "nv_peer_mem"}
_CAP_IPC_LOCK = 14  # include/uapi/linux/capability.h


@dataclass(frozen=True, slots=True)
class Process:
    """What this process may do.

    Attributes:
        memlock_bytes: memory that it may lock; None = as much as it likes.
        verbs_devices: names in ``/dev/infiniband`` by which programs reach the devices.
        closed_devices: those of them that this user may not open.
        ucx: the library of the transport, which itself says why there is none.
        nixl: likewise.
    """

    memlock_bytes: int | None
    verbs_devices: tuple[str, ...]
    closed_devices: tuple[str, ...]
    ucx: NetworkLibrary | None
    nixl: NetworkLibrary | None


@dataclass(frozen=True, slots=True)
class Precondition:
    """One thing that RDMA needs: what was found, and what to do; no remedy where all is well."""

    name: str
    found: str
    remedy: str = ""


def read_process(root: Path = Path("/")) -> Process:
    """Of this process; ``root`` stands for ``/``."""
    folder = root / "dev/infiniband"
    devices = sorted(path for path in folder.glob("uverbs*"))
    return Process(
        memlock_bytes=_memlock_bytes(root),
        verbs_devices=tuple(path.name for path in devices),
        closed_devices=tuple(
            path.name for path in devices if not os.access(path, os.R_OK | os.W_OK)
        ),
        ucx=_library(ucx_library),
        nixl=_library(nixl_library),
    )


def preconditions(facts: Facts, process: Process) -> list[Precondition]:
    """All of them, those of the devices first."""
    hardware = [nic for nic in facts.nics if not nic.software]
    return [
        *_devices(facts, hardware),
        *_access(process, bool(hardware)),
        _memlock(process),
        *_gpudirect(facts),
        *_ucx(process.ucx, bool(hardware)),
        *_nixl(process.nixl),
    ]


def _devices(facts: Facts, hardware: list[Nic]) -> Iterator[Precondition]:
    if not hardware:
        yield Precondition(
            "RDMA devices",
            "none",
            "without one ucx and nixl use TCP; for RDMA load the NIC's driver (modprobe mlx5_ib) "
            "and see that /sys/class/infiniband has it",
        )
    for nic in hardware:
        for port in nic.ports:
            rate = "" if port.gbit_per_s is None else f", {port.gbit_per_s:g} Gbit/s"
            layer = f", {port.link_layer}" if port.link_layer else ""
            remedy = ""
            if port.state != "active":
                remedy = "check cable and switch port"
                if port.link_layer == "InfiniBand":
                    remedy += "; a port in state init waits for a subnet manager (opensm)"
            yield Precondition(
                f"RDMA {nic.name} port {port.number}",
                f"{port.state or 'of unknown state'}{rate}{layer}",
                remedy,
            )
        if not nic.ports:
            yield Precondition(f"RDMA {nic.name}", "no port", "see the kernel's log (dmesg)")
    for nic in facts.nics:
        if nic.software:
            yield Precondition(f"RDMA {nic.name}", "emulated by the kernel: ignored")


def _access(process: Process, has_hardware: bool) -> Iterator[Precondition]:
    if not has_hardware:
        return
    name = "/dev/infiniband"
    if not process.verbs_devices:
        yield Precondition(
            name,
            "no uverbs device",
            "modprobe ib_uverbs; into a container pass it (docker --device /dev/infiniband)",
        )
    elif process.closed_devices:
        yield Precondition(
            name,
            f"{', '.join(process.closed_devices)} cannot be opened by this user",
            "give this user read and write access to it (a group of udev's rules)",
        )
    else:
        yield Precondition(name, ", ".join(process.verbs_devices))


def _memlock(process: Process) -> Precondition:
    name = "lockable memory"
    if process.memlock_bytes is None:
        return Precondition(name, "without limit")
    return Precondition(
        name,
        f"at most {format_bytes(process.memlock_bytes)}",
        "NICs and GPUs pin what they reach: ulimit -l unlimited (limits.conf memlock, systemd "
        "LimitMEMLOCK=infinity, docker --ulimit memlock=-1)",
    )


def _gpudirect(facts: Facts) -> Iterator[Precondition]:
    if not facts.gpus:
        return
    name = "GPUDirect RDMA"
    loaded = sorted(_PEERMEM & set(facts.host.modules or ()))
    if loaded:
        yield Precondition(name, f"{loaded[0]} is loaded")
    elif all(gpu.dmabuf for gpu in facts.gpus):
        yield Precondition(name, "by dma-buf")
    else:
        yield Precondition(
            name,
            "neither nvidia_peermem nor dma-buf",
            "modprobe nvidia_peermem, or the open kernel modules on kernel 5.12 or later; until "
            "then GPU memory is staged through the host",
        )


def _ucx(found: NetworkLibrary | None, has_hardware: bool) -> Iterator[Precondition]:
    if found is None:
        return
    remedy = ""
    if has_hardware and not found.has_verbs:
        remedy = (
            "this one knows no RDMA devices: install the system's UCX with verbs (rdma-core, "
            "ucx-ib), which is taken first"
        )
    yield Precondition("UCX", _described(found), remedy)


def _nixl(found: NetworkLibrary | None) -> Iterator[Precondition]:
    if found is None:
        return
    remedy = "" if "UCX" in found.plugins else "its plug-in UCX is missing: install the wheel again"
    plugins = ", ".join(found.plugins) or "none"
    yield Precondition("NIXL", f"{_described(found)}; plug-ins {plugins}", remedy)


def _described(found: NetworkLibrary) -> str:
    parts = [
        f"{'with' if has else 'without'} {part}"
        for part, has in (("verbs", found.has_verbs), ("CUDA", found.has_cuda))
    ]
    return f"{found.version} ({found.source}), {', '.join(parts)}"


def _library(look: Callable[[], NetworkLibrary]) -> NetworkLibrary | None:
    try:
        return look()
    except NotAvailable:
        return None


def _memlock_bytes(root: Path) -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY or _may_lock_all(root) else limit


def _may_lock_all(root: Path) -> bool:
    """Whether the limit does not hold: the capability CAP_IPC_LOCK is in effect."""
    try:
        text = (root / "proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value.strip(), 16) >> _CAP_IPC_LOCK & 1)
    return False
