"""Reads this machine. What cannot be read is left out, and is then unknown."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from kvxfer.diagnose.inventory.acs import read_acs
from kvxfer.diagnose.inventory.kernel_log import read_kernel_log
from kvxfer.diagnose.inventory.nvml import read_nvml
from kvxfer.diagnose.inventory.sources import Sources
from kvxfer.diagnose.inventory.system import ALLOWED_CPUS

_FILES = (
    "/proc/cpuinfo",
    "/proc/modules",
    "/proc/self/status",
    "/proc/driver/nvidia/version",
    "/proc/sys/kernel/osrelease",
    "/proc/[0-9]*/comm",
    "/sys/hypervisor/type",
    "/sys/class/dmi/id/sys_vendor",
    "/sys/class/dmi/id/product_name",
    "/sys/devices/system/node/node*/cpulist",
    "/sys/bus/pci/devices/*/vendor",
    "/sys/bus/pci/devices/*/class",
    "/sys/bus/pci/devices/*/numa_node",
    "/sys/bus/pci/devices/*/iommu_group/type",
    "/sys/class/infiniband/*/node_type",
    "/sys/class/infiniband/*/device/numa_node",
    "/sys/class/infiniband/*/device/uevent",
    "/sys/class/infiniband/*/ports/*/state",
    "/sys/class/infiniband/*/ports/*/phys_state",
    "/sys/class/infiniband/*/ports/*/rate",
    "/sys/class/infiniband/*/ports/*/link_layer",
)
_LINKS = (
    "/proc/self/ns/pid",
    "/proc/self/ns/ipc",
    "/sys/class/infiniband/*",
    "/sys/bus/pci/devices/*",
    "/sys/bus/pci/devices/*/driver",
    "/sys/bus/pci/devices/*/physfn",
)
_MARKS = ("/dev/nvidia-caps-imex-channels/*", "/.dockerenv", "/run/.containerenv")
_MAX_FILE_BYTES = 64 << 10
_COMMANDS_KEPT = ("nv-fabricmanager", "nvidia-imex")
_FABRIC_MANAGER = "nv-fabricmanager"
_TOOL_S = 2.0


def read_live(root: Path = Path("/")) -> Sources:
    """Everything that a capture holds, of this machine; ``root`` stands for ``/``."""
    texts = {"dmesg.txt": read_kernel_log(), "fabricmanager.txt": _fabric_manager_version()}
    return Sources(
        nvml=read_nvml(),
        files=_files(root),
        links=_links(root),
        acs=read_acs(root / "sys/bus/pci/devices"),
        texts={name: text for name, text in texts.items() if text is not None},
        is_live=True,
    )


def _files(root: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for pattern in _FILES:
        for path in root.glob(pattern[1:]):
            name = "/" + path.relative_to(root).as_posix()
            text = _text(path)
            if text is None or (name.endswith("/comm") and not text.startswith(_names())):
                continue
            found[name] = _SHORTENED.get(name, str)(text)
    for pattern in _MARKS:
        found |= {"/" + path.relative_to(root).as_posix(): "" for path in root.glob(pattern[1:])}
    return found


def _names() -> tuple[str, ...]:
    return tuple(name[:15] for name in _COMMANDS_KEPT)  # as long as the kernel keeps them


def _links(root: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for pattern in _LINKS:
        for path in root.glob(pattern[1:]):
            try:
                found["/" + path.relative_to(root).as_posix()] = str(path.readlink())
            except OSError:
                continue
    return found


def _text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode(errors="replace").strip()
    except OSError:
        return None


def _first_processor(cpuinfo: str) -> str:
    return cpuinfo.partition("\n\n")[0]


def _usable_cpus(status: str) -> str:
    return "\n".join(line for line in status.splitlines() if line.startswith(ALLOWED_CPUS))


# What a capture needs of files that say much more.
_SHORTENED: dict[str, Callable[[str], str]] = {
    "/proc/cpuinfo": _first_processor,
    "/proc/self/status": _usable_cpus,
}


def _fabric_manager_version() -> str | None:
    """What its program prints: no interface tells the version."""
    program = shutil.which(_FABRIC_MANAGER)
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_TOOL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout
