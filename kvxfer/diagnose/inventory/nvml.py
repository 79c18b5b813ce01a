"""GPUs by NVML, and what CUDA says of them. Each value that is not told is unknown."""

import ctypes
from itertools import permutations
from typing import Any

import pynvml

from kvxfer import _core
from kvxfer.diagnose.facts import Fabric, Gpu, GpuPair, NvLink, PcieLink, format_pci
from kvxfer.diagnose.inventory.fabric_health import describe_health, fields_of_nvml
from kvxfer.diagnose.inventory.sources import Nvml
from kvxfer.errors import CudaError, NotAvailable
from kvxfer.sweep.peers.cuda_driver import load_driver

_MB_PER_GB = 1000.0
_P2P_READ = 0  # NVML_P2P_CAPS_INDEX_READ, which the package has as a tuple
_DMABUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_ERROR_COUNTERS = (
    pynvml.NVML_NVLINK_ERROR_DL_REPLAY,
    pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,
    pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
)
_REMOTE = {
    pynvml.NVML_NVLINK_DEVICE_TYPE_GPU: "gpu",
    pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: "switch",
}
_FABRIC_STATES = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED: "not supported",
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: "not started",
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: "in progress",
    pynvml.NVML_GPU_FABRIC_STATE_COMPLETED: "completed",
}
_P2P = {
    pynvml.NVML_P2P_STATUS_OK: "ok",
    pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED: "chipset not supported",
    pynvml.NVML_P2P_STATUS_GPU_NOT_SUPPORTED: "GPU not supported",
    pynvml.NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED: "topology not supported",
    pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY: "disabled by regkey",
    pynvml.NVML_P2P_STATUS_NOT_SUPPORTED: "not supported",
}
_ANCESTORS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "PIX",
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}
# Bits of nvmlClocksEventReasons; not power limit and idleness, which healthy GPUs have.
_SLOWDOWNS = {
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}


def read_nvml() -> Nvml:
    """All of it; never raises for what a machine lacks."""
    status, reason, dmabuf = _read_cuda()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Nvml(reason=f"NVML: {error}", cuda_status=status, cuda_reason=reason)
    try:
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        seen = _cuda_indices()
        gpus = tuple(_gpu(index, handle, seen, dmabuf) for index, handle in enumerate(handles))
        return Nvml(
            gpus=gpus,
            pairs=tuple(
                _pair(gpus[a], gpus[b], handles[a], handles[b])
                for a, b in permutations(range(count), 2)
            ),
            driver=_known("nvmlSystemGetDriverVersion") or "",
            cuda_status=status,
            cuda_reason=reason,
        )
    except pynvml.NVMLError as error:
        return Nvml(reason=f"NVML: {error}", cuda_status=status, cuda_reason=reason)
    finally:
        pynvml.nvmlShutdown()


def read_pcie(pci: str) -> PcieLink | None:
    """The PCIe link of a GPU as it is now, which is at full speed while it copies."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = _known("nvmlDeviceGetHandleByPciBusId", pci.encode())
        return None if handle is None else _pcie(handle)
    finally:
        pynvml.nvmlShutdown()


def _read_cuda() -> tuple[int | None, str, dict[str, bool]]:
    """(status of the driver's start, reason, PCI address -> dma-buf support)."""
    try:
        driver = load_driver()
    except NotAvailable as error:
        return None, str(error), {}
    except CudaError as error:
        return error.code, _core.no_device_reason() or str(error), {}
    dmabuf: dict[str, bool] = {}
    for index in range(_core.device_count()):
        value, device = ctypes.c_int(), ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(device), index):
            continue
        if not driver.cuDeviceGetAttribute(ctypes.byref(value), _DMABUF_SUPPORTED, device):
            dmabuf[format_pci(_core.device_info(index).pci_bus_id)] = bool(value.value)
    return 0, _core.no_device_reason(), dmabuf


def _cuda_indices() -> dict[str, int]:
    return {
        format_pci(_core.device_info(index).pci_bus_id): index
        for index in range(_core.device_count())
    }


def _known(name: str, *arguments: Any) -> Any:
    """What a call of NVML answers; None where it refuses, or the driver or the package lacks it."""
    call = getattr(pynvml, name, None)
    if call is None:
        return None
    try:
        return call(*arguments)
    except pynvml.NVMLError:
        return None


def _gpu(index: int, handle: Any, seen: dict[str, int], dmabuf: dict[str, bool]) -> Gpu:
    bus_id = pynvml.nvmlDeviceGetPciInfo(handle).busId
    pci = format_pci(bus_id.decode() if isinstance(bus_id, bytes) else bus_id)
    memory = _known("nvmlDeviceGetMemoryInfo", handle)
    mig = _known("nvmlDeviceGetMigMode", handle)
    remapped = _known("nvmlDeviceGetRemappedRows", handle)
    return Gpu(
        index=index,
        name=_known("nvmlDeviceGetName", handle) or "",
        uuid=_known("nvmlDeviceGetUUID", handle) or "",
        pci=pci,
        cuda_index=seen.get(pci),
        memory_bytes=None if memory is None else int(memory.total),
        pcie=_pcie(handle),
        links=_links(handle),
        fabric=_fabric(handle),
        mig=None if mig is None else bool(mig[0]),
        dmabuf=dmabuf.get(pci),
        row_remap_failed=None if remapped is None else bool(remapped[3]),
        row_remap_pending=None if remapped is None else bool(remapped[2]),
        slowdown=_slowdown(handle),
    )


def _pcie(handle: Any) -> PcieLink:
    return PcieLink(
        generation=_known("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        best_generation=_known("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        width=_known("nvmlDeviceGetCurrPcieLinkWidth", handle),
        best_width=_known("nvmlDeviceGetMaxPcieLinkWidth", handle),
    )


def _slowdown(handle: Any) -> str | None:
    reasons = _known("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:
        return None
    return ", ".join(text for bit, text in _SLOWDOWNS.items() if reasons & bit)


def _links(handle: Any) -> tuple[NvLink, ...]:
    states = (
        (link, _known("nvmlDeviceGetNvLinkState", handle, link))
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
    )
    return tuple(_link(handle, link, bool(state)) for link, state in states if state is not None)


def _link(handle: Any, link: int, active: bool) -> NvLink:
    if not active:
        return NvLink(index=link, active=False)
    remote = _known("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
    kind = _known("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
    counters = [
        _known("nvmlDeviceGetNvLinkErrorCounter", handle, link, one) for one in _ERROR_COUNTERS
    ]
    known = [int(value) for value in counters if value is not None]
    bus_id = remote.busId if remote is not None else ""
    return NvLink(
        index=link,
        active=True,
        gb_per_s=_link_gb_per_s(handle, link),
        remote="unknown" if kind is None else _REMOTE.get(kind, "unknown"),
        remote_pci=format_pci(bus_id.decode() if isinstance(bus_id, bytes) else bus_id),
        num_errors=sum(known) if known else None,
    )


def _link_gb_per_s(handle: Any, link: int) -> float | None:
    field = (pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, link)
    values = _known("nvmlDeviceGetFieldValues", handle, [field])
    if values is None or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return float(values[0].value.uiVal) / _MB_PER_GB or None


def _fabric(handle: Any) -> Fabric | None:
    info = _fabric_info(handle)
    if info is None:
        return None
    status = int(info.status)
    failed = status != pynvml.NVML_SUCCESS
    return Fabric(
        state=_FABRIC_STATES.get(int(info.state), f"state {int(info.state)}"),
        status=str(pynvml.NVMLError(status)).lower() if failed else "success",
        clique=int(info.cliqueId),
        cluster=bytes(info.clusterUuid).hex(),
        health=describe_health(
            fields_of_nvml(
                int(getattr(info, "healthMask", 0)), int(getattr(info, "healthSummary", 0))
            )
        ),
    )


def _fabric_info(handle: Any) -> Any:
    # The newest form first: older drivers, and older packages, know no summary or no health.
    for call, kind in (
        ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v3_t"),
        ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfoV_t"),  # version 2
        ("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),
    ):
        if hasattr(pynvml, kind):
            info = getattr(pynvml, kind)()
            if _known(call, handle, ctypes.byref(info)) is not None:
                return info
    return None


def _pair(src: Gpu, dst: Gpu, src_handle: Any, dst_handle: Any) -> GpuPair:
    def status(index: int) -> str | None:
        found = _known("nvmlDeviceGetP2PStatus", src_handle, dst_handle, index)
        return _P2P.get(found)

    access = None
    if src.cuda_index is not None and dst.cuda_index is not None:
        access = _core.can_access_peer(src.cuda_index, dst.cuda_index)
    nvlink = status(pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    num_links = _num_links(src, dst, nvlink)
    level = _known("nvmlDeviceGetTopologyCommonAncestor", src_handle, dst_handle)
    return GpuPair(
        src=src.index,
        dst=dst.index,
        path=f"NV{num_links}" if num_links else _ANCESTORS.get(level, ""),
        nvlink=nvlink,
        read=status(_P2P_READ),
        write=status(pynvml.NVML_P2P_CAPS_INDEX_WRITE),
        cuda_access=access,
    )


def _num_links(src: Gpu, dst: Gpu, status: str | None) -> int:
    """NVLinks to the peer itself; else those that go through switches, or are said to."""
    direct = sum(link.remote_pci == dst.pci for link in src.active_links)
    if direct or status == "ok":
        return direct or min(len(gpu.active_links) for gpu in (src, dst))
    return min(sum(link.remote == "switch" for link in gpu.active_links) for gpu in (src, dst))
