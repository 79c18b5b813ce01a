"""The host's part of the facts, from files of ``/sys`` and ``/proc``."""

import os
import re

from kvxfer.diagnose.facts import Host, NumaNode
from kvxfer.diagnose.inventory.acs import parse_lspci
from kvxfer.diagnose.inventory.kernel_log import parse_xids
from kvxfer.diagnose.inventory.perftest_text import refused_errno
from kvxfer.diagnose.inventory.sources import Sources
from kvxfer.errors import InvalidUsage

_DEVICES = "/sys/bus/pci/devices"
_NODES = "/sys/devices/system/node"
_MAX_NODES = 1024  # of Linux: CONFIG_NODES_SHIFT is 10 at most
_IMEX = "/dev/nvidia-caps-imex-channels"
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")
_SWITCH_CLASS = "0x0680"  # "bridge, other": how NVSwitches present themselves
ALLOWED_CPUS = "Cpus_allowed_list:"  # in /proc/PID/status
# Inodes of the first namespaces: include/linux/proc_ns.h, PROC_PID_INIT_INO and PROC_IPC_INIT_INO.
_HOST_NAMESPACES = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}
_MODULES = ("nvidia", "nvidia_peermem", "nv_peer_mem", "mlx5_ib", "ib_uverbs")
# What a virtual machine's firmware calls itself.
_VENDORS = {
    "qemu": "QEMU",
    "microsoft corporation": "Hyper-V",
    "xen": "Xen",
    "vmware, inc.": "VMware",
    "google": "Google Compute Engine",
    "amazon ec2": "Amazon EC2",
}
_IOMMU_TYPES = {"identity": "passthrough", "dma": "translated", "dma-fq": "translated"}
# What CUDA says of errors with which it does not start (cuGetErrorString): many programs print no
# number, or a line number of their own first.
_CUDA_WORDS = {
    "system not yet initialized": 802,
    "unsupported display driver / cuda driver combination": 803,
    "no cuda-capable device is detected": 100,
}
_VERSION = re.compile(r"\b(\d{3,}(?:\.\d+)+)\b")


def host_of(sources: Sources) -> Host:
    """All that the files say of the host.

    Raises:
        InvalidUsage: they tell of more NUMA nodes than any host has.
    """
    files = sources.files
    cuda_status, cuda_reason = _cuda(sources)
    log = sources.texts.get("dmesg.txt")
    return Host(
        kernel=files.get("/proc/sys/kernel/osrelease", ""),
        cpu=_cpu_field(files, "model name"),
        num_cpus=len(_usable_cpus(sources)) or None,
        numa_nodes=_numa_nodes(sources),
        gpu_pcis=_nvidia_devices(sources, _GPU_CLASSES),
        gpu_drivers=_drivers(sources),
        nvml_reason=_nvml_reason(sources),
        nvswitch_pcis=_nvidia_devices(sources, (_SWITCH_CLASS,)),
        driver=_driver(sources),
        cuda_status=cuda_status,
        cuda_reason=cuda_reason,
        fabric_manager=_fabric_manager(sources),
        fabric_manager_running=_runs(sources, "nv-fabricmanager"),
        modules=_modules(files),
        iommu=_iommu(sources),
        acs_ports=_acs_ports(sources),
        hypervisor=_hypervisor(files),
        container=_container(sources),
        pid_namespace=_namespace(sources, "pid"),
        ipc_namespace=_namespace(sources, "ipc"),
        imex_channels=_imex_channels(sources),
        xids=None if log is None else parse_xids(log),
        rdma_errno=refused_errno(sources.texts),
    )


def _cuda(sources: Sources) -> tuple[int | None, str]:
    if sources.nvml is not None:
        return sources.nvml.cuda_status, sources.nvml.cuda_reason
    text = sources.texts.get("cuda.txt", "").strip()
    lower = text.lower()
    if found := [code for words, code in _CUDA_WORDS.items() if words in lower]:
        return found[0], text
    match = re.search(r"(?:error|status|code)\D{0,3}(\d{1,3})\b", text, re.IGNORECASE)
    return (int(match[1]), text) if match else (None, text)


def _cpu_field(files: dict[str, str], name: str) -> str:
    for line in files.get("/proc/cpuinfo", "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _numa_nodes(sources: Sources) -> tuple[NumaNode, ...]:
    usable = _usable_cpus(sources)
    found = []
    names = sources.below(_NODES)
    if len(names) > _MAX_NODES:
        raise InvalidUsage(
            f"the capture tells of {len(names)} NUMA nodes; at most {_MAX_NODES} are judged"
        )
    for name in names:
        text = sources.files.get(f"{_NODES}/{name}/cpulist", "")
        if re.fullmatch(r"node\d{1,4}", name) and text:
            cpus = parse_cpulist(text)
            found.append(
                NumaNode(
                    index=int(name[4:]), cpus=cpus, usable_cpus=tuple(sorted(usable & set(cpus)))
                )
            )
    return tuple(sorted(found, key=lambda node: node.index))


def _usable_cpus(sources: Sources) -> set[int]:
    """CPUs that this process, or the one that captured, may run on; none = unknown."""
    if sources.is_live:
        return os.sched_getaffinity(0)
    for line in sources.files.get("/proc/self/status", "").splitlines():
        if line.startswith(ALLOWED_CPUS):
            return set(parse_cpulist(line.removeprefix(ALLOWED_CPUS)))
    return set()


def parse_cpulist(text: str) -> tuple[int, ...]:
    """``0-3,8`` as (0, 1, 2, 3, 8); parts that are no numbers of CPUs are left out."""
    cpus: set[int] = set()
    for part in text.split(","):
        if match := re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part):
            first = int(match[1])
            cpus.update(range(first, int(match[2] or first) + 1))
    return tuple(sorted(cpus))


def _nvidia_devices(sources: Sources, classes: tuple[str, ...]) -> tuple[str, ...] | None:
    """Those of a class; no virtual functions, which a driver of virtual machines hands out."""
    names = sources.below(_DEVICES)
    if not names:
        return None
    files = sources.files
    return tuple(
        name
        for name in names
        if files.get(f"{_DEVICES}/{name}/vendor") == _NVIDIA
        and files.get(f"{_DEVICES}/{name}/class", "").startswith(classes)
        and f"{_DEVICES}/{name}/physfn" not in sources.links
    )


def _drivers(sources: Sources) -> dict[str, str]:
    """Of the GPUs on the bus: the driver each is bound to, where it was looked for."""
    gpus = _nvidia_devices(sources, _GPU_CLASSES) or ()
    # Some device of any machine has a driver: without a link to one nobody looked for them.
    if not any(path.startswith(_DEVICES) and path.endswith("/driver") for path in sources.links):
        return {}
    targets = {gpu: sources.links.get(f"{_DEVICES}/{gpu}/driver", "") for gpu in gpus}
    return {gpu: target.rpartition("/")[2] for gpu, target in targets.items()}


def _nvml_reason(sources: Sources) -> str:
    if sources.nvml is None or sources.nvml.gpus:
        return ""
    return sources.nvml.reason or "NVML lists no GPU"


def _driver(sources: Sources) -> str | None:
    if sources.nvml is not None and sources.nvml.driver:
        return sources.nvml.driver
    text = sources.files.get("/proc/driver/nvidia/version", "")
    query = re.search(r"Driver Version\s*:\s*(\S+)", sources.texts.get("query.txt", ""))
    match = query or _VERSION.search(text)
    if match:
        return match[1]
    return "" if "/proc/modules" in sources.files else None


def _fabric_manager(sources: Sources) -> str | None:
    text = sources.texts.get("fabricmanager.txt")
    match = _VERSION.search(text or "")
    return match[1] if match else None


def _runs(sources: Sources, program: str) -> bool | None:
    if any(value.startswith(program[:15]) for value in _commands(sources)):
        return True
    # Another PID namespace hides it, and a capture need not have looked.
    looked = sources.is_live or any(path.endswith("/comm") for path in sources.files)
    return False if looked and _namespace(sources, "pid") == "" else None


def _commands(sources: Sources) -> list[str]:
    return [
        value
        for path, value in sources.files.items()
        if path.startswith("/proc/") and path.endswith("/comm")
    ]


def _modules(files: dict[str, str]) -> tuple[str, ...] | None:
    text = files.get("/proc/modules")
    if text is None:
        return None
    loaded = {line.split()[0] for line in text.splitlines() if line.strip()}
    return tuple(name for name in _MODULES if name in loaded)


def _iommu(sources: Sources) -> str | None:
    """Of the GPUs' groups, or of all where there is no GPU."""
    names = sources.below(_DEVICES)
    gpus = _nvidia_devices(sources, _GPU_CLASSES)
    if not names:
        return None
    types = {
        sources.files.get(f"{_DEVICES}/{name}/iommu_group/type", "").lower()
        for name in gpus or names
    } - {""}
    if not types:
        return "off"
    return "translated" if types & {"dma", "dma-fq"} else _IOMMU_TYPES.get(min(types), min(types))


def _acs_ports(sources: Sources) -> tuple[str, ...] | None:
    if sources.acs is not None:
        return tuple(port for port, control in sorted(sources.acs.items()) if control)
    text = sources.texts.get("lspci.txt")
    return None if text is None else parse_lspci(text)


def _hypervisor(files: dict[str, str]) -> str | None:
    if files.get("/sys/hypervisor/type"):
        return files["/sys/hypervisor/type"]
    if "/proc/cpuinfo" not in files:
        return None
    if "hypervisor" not in _cpu_field(files, "flags").split():
        return ""
    vendor = files.get("/sys/class/dmi/id/sys_vendor", "").lower()
    return _VENDORS.get(vendor, "a hypervisor")


def _container(sources: Sources) -> bool | None:
    if {"/.dockerenv", "/run/.containerenv"} & sources.files.keys():
        return True
    namespace = _namespace(sources, "pid")
    return None if namespace is None else namespace != ""


def _namespace(sources: Sources, kind: str) -> str | None:
    """The inode where it is another than the host's; empty where it is that; None = unknown."""
    match = re.search(r"\[(\d+)\]", sources.links.get(f"/proc/self/ns/{kind}", ""))
    if match is None:
        return None
    return "" if int(match[1]) == _HOST_NAMESPACES[kind] else match[1]


def _imex_channels(sources: Sources) -> int | None:
    return len(sources.below(_IMEX)) or None
