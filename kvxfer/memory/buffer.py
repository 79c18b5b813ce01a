"""Arrays of any library as address ranges.

An array comes in by DLPack, or by ``__array_interface__`` / ``__cuda_array_interface__`` where its
dtype has no DLPack code. No array library is imported: whoever passes a torch tensor has torch.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from kvxfer import _core
from kvxfer.errors import InvalidUsage

_DLPACK_CPU = 1
_DLPACK_CUDA = 2
_DLPACK_CUDA_HOST = 3


class MemoryKind(str, Enum):
    """Where memory lies."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A contiguous address range and whoever owns it.

    Attributes:
        address: first byte, as this process sees it.
        num_bytes: length in bytes.
        kind: host or device memory.
        device: CUDA device index, or -1 for host memory.
        owner: keeps the memory alive as long as the buffer lives.
    """

    address: int
    num_bytes: int
    kind: MemoryKind
    device: int
    owner: Any = field(repr=False, compare=False)

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.address + self.num_bytes


def as_buffer(array: Any) -> Buffer:
    """The address range of a contiguous array (numpy, torch, cupy, or a core buffer).

    Raises:
        InvalidUsage: not an array, empty, not contiguous, read-only, or on a device that is neither
            CPU nor CUDA.
    """
    if isinstance(array, Buffer):
        return array
    if isinstance(array, _core.DeviceBuffer):
        return Buffer(array.address, array.num_bytes, MemoryKind.DEVICE, array.device, array)
    what = _describe(array)
    if hasattr(array, "__array_interface__"):
        result = _read_interface(array, array.__array_interface__, what, MemoryKind.HOST)
    elif hasattr(array, "data_ptr") and hasattr(array, "is_contiguous"):
        result = _read_tensor(array, what)
    elif hasattr(array, "__dlpack__"):
        result = _read_dlpack(array, what)
    elif hasattr(array, "__cuda_array_interface__"):
        result = _read_interface(array, array.__cuda_array_interface__, what, MemoryKind.DEVICE)
    else:
        raise InvalidUsage(
            f"{what} is not an array; pass one with __dlpack__ or an array interface"
        )
    if result.num_bytes == 0:
        raise InvalidUsage(f"{what} is empty; a KV cache needs at least one block")
    return result


def _describe(array: Any) -> str:
    kind = type(array)
    shape = getattr(array, "shape", None)
    text = f"{kind.__module__}.{kind.__qualname__}"
    return text if shape is None else f"{text} of shape {tuple(shape)}"


def _refuse_strides(what: str) -> InvalidUsage:
    return InvalidUsage(f"{what} is not contiguous; pass array.contiguous() or a whole array")


def _read_interface(array: Any, interface: Any, what: str, kind: MemoryKind) -> Buffer:
    data = interface.get("data")
    if not isinstance(data, tuple):
        raise InvalidUsage(f"{what} states no address; pass a numpy, torch or cupy array")
    address, read_only = data
    if read_only:
        raise InvalidUsage(f"{what} is read-only; pass a writable array")
    dtype = np.dtype(interface["typestr"])
    if dtype.hasobject:
        raise InvalidUsage(f"{what} holds Python objects; pass an array of plain numbers")
    row_bytes = dtype.itemsize
    strides = interface.get("strides")
    for axis in range(len(interface["shape"]) - 1, -1, -1):
        length = interface["shape"][axis]
        if strides is not None and length > 1 and strides[axis] != row_bytes:
            raise _refuse_strides(what)
        row_bytes *= length
    device = -1
    if kind is MemoryKind.DEVICE and row_bytes:
        device = _core.pointer_info(address).device
    return Buffer(address, row_bytes, kind, device, array)


def _read_tensor(array: Any, what: str) -> Buffer:
    """A torch tensor, by its own methods: torch exports DLPack of the current device alone."""
    if array.device.type not in ("cpu", "cuda"):
        raise InvalidUsage(f"{what} is on {array.device}; use CPU or CUDA memory")
    if array.requires_grad:
        raise InvalidUsage(f"{what} carries a gradient; pass tensor.detach()")
    if not array.is_contiguous():
        raise _refuse_strides(what)
    address, num_bytes = array.data_ptr(), array.numel() * array.element_size()
    if array.device.type == "cpu":
        return Buffer(address, num_bytes, MemoryKind.HOST, -1, array)
    return Buffer(address, num_bytes, MemoryKind.DEVICE, array.device.index, array)


def _read_dlpack(array: Any, what: str) -> Buffer:
    try:
        # A consumer on CUDA passes a stream; -1 asks the producer not to synchronise at all: the
        # order of a transfer after compute is the caller's, by `after`.
        on_cuda = array.__dlpack_device__()[0] == _DLPACK_CUDA
        capsule = array.__dlpack__(stream=-1) if on_cuda else array.__dlpack__()
    except (BufferError, TypeError, RuntimeError) as error:
        raise InvalidUsage(
            f"{what} cannot be shared ({error}); pass a writable array without gradient"
        ) from error
    info = _core.read_dlpack(capsule)
    if info.num_bytes and not info.contiguous:
        raise _refuse_strides(what)
    if info.device_type == _DLPACK_CUDA:
        return Buffer(info.address, info.num_bytes, MemoryKind.DEVICE, info.device_id, capsule)
    if info.device_type in (_DLPACK_CPU, _DLPACK_CUDA_HOST):
        return Buffer(info.address, info.num_bytes, MemoryKind.HOST, -1, capsule)
    raise InvalidUsage(
        f"{what} is on a device of DLPack type {info.device_type}; use CPU (1) or CUDA (2) memory"
    )
