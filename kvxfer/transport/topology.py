"""What lies between two GPUs, read off the devices.

NVML (the ``pynvml`` module of nvidia-ml-py) has its home here; a machine without its library is
"unknown", never an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pynvml

from kvxfer import _core

_MB_PER_S_PER_GB_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class GpuPath:
    """The path between two GPUs.

    Attributes:
        name: ``nvlink``, ``pcie``, ``same device`` or ``peer access`` (kind unknown).
        limit_gb_per_s: what the hardware can carry one way, in 1e9 bytes a second; None = unknown.
        source: where the limit comes from.
    """

    name: str
    limit_gb_per_s: float | None
    source: str


def visible_device(uuid: str) -> int | None:
    """The CUDA index of a GPU in this process; None where it is not among its GPUs."""
    for index in range(_core.device_count()):
        if _core.device_info(index).uuid == uuid:
            return index
    return None


def gpu_path(local_device: int, remote_device: int) -> GpuPath:
    """The path from one visible GPU to another (CUDA device indices)."""
    local = _core.device_info(local_device)
    if local_device == remote_device:
        # A copy within one memory reads and writes it.
        limit = local.memory_gb_per_s / 2 or None
        return GpuPath("same device", limit, "half of memory clock x bus width")
    remote = _core.device_info(remote_device)
    with _nvml() as found:
        if not found:
            return GpuPath("peer access", None, "NVML is not here")
        try:
            handles = [
                pynvml.nvmlDeviceGetHandleByPciBusId(info.pci_bus_id.encode())
                for info in (local, remote)
            ]
            status = pynvml.nvmlDeviceGetP2PStatus(*handles, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        except pynvml.NVMLError as error:
            return GpuPath("peer access", None, f"NVML: {error}")
        if status != pynvml.NVML_P2P_STATUS_OK:
            return GpuPath("pcie", None, "NVML reports no NVLink between the two")
        rates = [_nvlink_gb_per_s(handle) for handle in handles]
        links, rate = min(rates)
        return GpuPath("nvlink", rate or None, f"{links} active NVLinks x their rate, by NVML")


def _nvlink_gb_per_s(handle: object) -> tuple[int, float]:
    """(active links, sum of their rates one way)."""
    num_links = 0
    total = 0.0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
        except pynvml.NVMLError:
            continue
        num_links += 1
        total += _link_rate_mb_per_s(handle, link) / _MB_PER_S_PER_GB_PER_S
    return num_links, total


def _link_rate_mb_per_s(handle: object, link: int) -> float:
    field = pynvml.NVML_FI_DEV_NVLINK_GET_SPEED
    value = pynvml.nvmlDeviceGetFieldValues(handle, [(field, link)])[0]
    return float(value.value.uiVal) if value.nvmlReturn == pynvml.NVML_SUCCESS else 0.0


@contextmanager
def _nvml() -> Iterator[bool]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str:
    """The NVIDIA driver's version, or empty."""
    with _nvml() as found:
        return _text(pynvml.nvmlSystemGetDriverVersion()) if found else ""


def gpu_names() -> list[str]:
    """The names of all GPUs of this host, whichever of them CUDA sees; empty where NVML fails."""
    with _nvml() as found:
        if not found:
            return []
        try:
            handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
            return [_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        except pynvml.NVMLError:
            return []


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
