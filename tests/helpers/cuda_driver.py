"""The few driver calls that tests need beside kvxfer, by ctypes: what checks it is not part of it.

Everything runs in the device's primary context, which kvxfer, torch and cupy use too.
"""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from cache_content import Bytes

_POSIX_FD = 1
_READ_WRITE = 3
_DEVICE = 1
_PINNED = 1

_Address = ctypes.c_uint64
_Size = ctypes.c_size_t


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    assert library.cuInit(0) == 0
    return library


def _call(name: str, *args: Any) -> None:
    # Every argument is a ctypes value: a bare int would be cut to 32 bits.
    status = getattr(_library(), name)(*args)
    if status != 0:
        raise RuntimeError(f"{name} failed with status {status}")


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
    return context


@contextmanager
def _on(device: int) -> Iterator[None]:
    _call("cuCtxPushCurrent_v2", _primary_context(device))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def read(device: int, address: int, num_bytes: int) -> Bytes:
    """What lies at a device address now; waits for no stream of torch or of kvxfer."""
    data = np.empty(num_bytes, np.uint8)
    with _on(device):
        host = ctypes.c_void_p(data.ctypes.data)
        _call("cuMemcpyDtoH_v2", host, _Address(address), _Size(num_bytes))
    return data


def write(device: int, address: int, data: Bytes) -> None:
    """Write ``data`` to a device address; every later work of any stream sees it."""
    data = np.ascontiguousarray(data)
    with _on(device):
        host = ctypes.c_void_p(data.ctypes.data)
        _call("cuMemcpyHtoD_v2", _Address(address), host, _Size(data.nbytes))
        # From pageable memory the call may return before the bytes are there.
        _call("cuStreamSynchronize", ctypes.c_void_p(0))


def synchronize(device: int) -> None:
    """Wait for all streams of the device's context."""
    with _on(device):
        _call("cuCtxSynchronize")


def free_bytes(device: int) -> int:
    """Memory of the device that no process holds."""
    free, total = _Size(), _Size()
    with _on(device):
        _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


def current_context() -> int:
    """The calling thread's current context; 0 for none. It stands for the current device."""
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    return context.value or 0


def make_current(device: int) -> None:
    """Make a device current for the calling thread, as cudaSetDevice does."""
    _call("cuCtxSetCurrent", _primary_context(device))


class VirtualMemory:
    """A row of separate physical chunks mapped one behind the other, as expandable segments are.

    Attributes:
        address: start of the reserved range.
        num_bytes: its length, ``num_chunks * chunk_bytes``.
        chunk_bytes: length of a chunk.
    """

    def __init__(
        self, device: int, num_chunks: int, *, exportable: bool = True, hole: int | None = None
    ) -> None:
        """Map ``num_chunks`` chunks, all but number ``hole``."""
        self._device = device
        location = _Location(_DEVICE, device)
        properties = _AllocationProperties(
            type=_PINNED, handle_types=_POSIX_FD if exportable else 0, location=location
        )
        with _on(device):
            granule = _Size()
            _call(
                "cuMemGetAllocationGranularity",
                ctypes.byref(granule),
                ctypes.byref(properties),
                ctypes.c_int(0),
            )
            self.chunk_bytes = granule.value
            self.num_bytes = num_chunks * self.chunk_bytes
            address = _Address()
            _call(
                "cuMemAddressReserve",
                ctypes.byref(address),
                _Size(self.num_bytes),
                _Size(0),
                _Address(0),
                ctypes.c_ulonglong(0),
            )
            self.address = address.value
            self._chunks = [
                self._map(index, properties) for index in range(num_chunks) if index != hole
            ]

    def _map(self, index: int, properties: _AllocationProperties) -> int:
        address = self.address + index * self.chunk_bytes
        handle = ctypes.c_ulonglong()
        size, none = _Size(self.chunk_bytes), ctypes.c_ulonglong(0)
        _call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), none)
        _call("cuMemMap", _Address(address), size, _Size(0), handle, none)
        access = _Access(properties.location, _READ_WRITE)
        _call("cuMemSetAccess", _Address(address), size, ctypes.byref(access), _Size(1))
        _call("cuMemRelease", handle)  # the mapping keeps the chunk
        return address

    def free(self) -> None:
        """Unmap and release everything; may be called more than once."""
        if not self._chunks:
            return
        with _on(self._device):
            for address in self._chunks:
                _call("cuMemUnmap", _Address(address), _Size(self.chunk_bytes))
            _call("cuMemAddressFree", _Address(self.address), _Size(self.num_bytes))
        self._chunks = []

    def __del__(self) -> None:
        if hasattr(self, "_chunks"):
            self.free()
