"""How the memory of two GPUs is reached: directly, or by way of pinned host memory.

NIXL does not tell which path its plug-in takes; what can be checked is whether there is a direct
one: between GPUs of one host CUDA's inter-process mappings, between hosts GPUDirect RDMA. Without
one UCX would move device memory through buffers of its own, at a fraction of the rate and without
a word, so that rows go through pinned host memory instead, and that is said.
"""

import functools
from pathlib import Path
from typing import NamedTuple

from kvxfer import _core
from kvxfer.errors import RegistrationError
from kvxfer.transport.topology import gpu_path, visible_device

_RDMA_DEVICES = Path("/sys/class/infiniband")
_MODULES = Path("/sys/module")
_PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")


class Reach(NamedTuple):
    """How slots are reached.

    Attributes:
        in_device: whether the slots of GPUs lie in their memory.
        name: of the path; empty where no GPU takes part.
        problem: why it is not the direct one; empty where it is.
        limit_gb_per_s: what the hardware carries one way; None = unknown.
    """

    in_device: bool
    name: str
    problem: str = ""
    limit_gb_per_s: float | None = None


class Side(NamedTuple):
    """One side, as it describes itself.

    Attributes:
        device_uuid: of the GPU that has its pages; empty for host memory.
        rdma: whether its host can have network cards read and write GPUs' memory.
        pid_namespace: of its process.
    """

    device_uuid: str
    rdma: bool
    pid_namespace: int


def reach(near: Side, far: Side, *, one_host: bool, device: int) -> Reach:
    """How the near side, with its pages on ``device``, reaches the far one."""
    if not near.device_uuid and not far.device_uuid:
        return Reach(False, "")
    problem = "one side's pages are in host memory"
    if near.device_uuid and far.device_uuid:
        if one_host:
            return _on_one_host(near, far, device)
        if near.rdma and far.rdma:
            return Reach(True, "GPUDirect RDMA")
        problem = (
            f"{'this' if not near.rdma else 'the other'} host has no network card that reads "
            "GPUs' memory, or this address keeps UCX from it (nvidia-peermem, bind_host=)"
        )
    return Reach(False, "pinned host memory", problem)


def _on_one_host(near: Side, far: Side, device: int) -> Reach:
    far_device = visible_device(far.device_uuid)
    if near.pid_namespace != far.pid_namespace:
        problem = "the processes are in different pid namespaces; share one"
    elif far_device is None:
        problem = f"GPU {far.device_uuid} is not visible here; add it to CUDA_VISIBLE_DEVICES"
    elif not _core.can_access_peer(device, far_device):
        problem = f"GPU {device} has no peer access to GPU {far_device}"
    else:
        return Reach(True, "cuda_ipc", limit_gb_per_s=gpu_path(device, far_device).limit_gb_per_s)
    return Reach(False, "pinned host memory", problem)


@functools.cache
def has_rdma() -> bool:
    """Whether this host has RDMA cards, and the kernel module that shows them GPUs' memory."""
    has_card = _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
    return has_card and any((_MODULES / name).is_dir() for name in _PEER_MEMORY)


def maps_directly(address: int) -> bool:
    """Whether UCX can map that device memory into another process.

    It knows what cudaMalloc gives; memory made of chunks (PyTorch's expandable segments) it would
    move through buffers of its own.
    """
    try:
        return _core.pointer_info(address).legacy_ipc
    except RegistrationError:
        return False
