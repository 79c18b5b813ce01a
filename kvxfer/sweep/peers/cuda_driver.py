"""The few calls of the CUDA driver that other people's ways to copy are made of, by ctypes.

A copy of kvxfer's own would need none of this: it has its kernels and copy engine in the core.
"""

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import CudaError, NotAvailable
from kvxfer.transport import Transfer

_NON_BLOCKING = 1
_NOT_READY = 600
# CUmemcpyAttributes: source access order, two location hints of two words each, flags.
_ATTRIBUTES_WORDS = 6
_SOURCE_ORDER_ANY = 3
_BATCH_NAMES = ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync")  # CUDA 13, CUDA 12.8


class CudaStream:
    """A stream of its own in the primary context of one GPU, which becomes this thread's."""

    def __init__(self, device: int) -> None:
        """Open the driver and make the stream.

        Raises:
            NotAvailable: there is no driver.
            CudaError: a call failed.
        """
        self._driver = load_driver()
        self._device = use_device(self._driver, device)
        self._stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
        self._copy = self._driver.cuMemcpyAsync
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]

    def copy_each(self, dst: Sequence[int], src: Sequence[int], num_bytes: int) -> None:
        """Queue one copy for each pair of addresses."""
        results = set[int]()
        copies = map(self._copy, dst, src, repeat(num_bytes), repeat(self._stream))
        deque(map(results.add, copies), maxlen=0)
        for status in results:
            self._require(status, "cuMemcpyAsync")

    def batch_name(self) -> str:
        """The batch call that this driver has.

        Raises:
            NotAvailable: none; it is of CUDA 12.8.
        """
        for name in _BATCH_NAMES:
            if hasattr(self._driver, name):
                return name
        raise NotAvailable("this driver has no cuMemcpyBatchAsync; it came with CUDA 12.8")

    def copy_batch(
        self, dst: NDArray[np.uint64], src: NDArray[np.uint64], sizes: NDArray[np.uint64]
    ) -> None:
        """Queue all copies by one call; all sources have been written long before."""
        name = self.batch_name()
        attributes = (ctypes.c_uint32 * _ATTRIBUTES_WORDS)(_SOURCE_ORDER_ANY)
        first = ctypes.c_size_t(0)  # the first copy that the attributes are for
        failed = ctypes.c_size_t(0)
        arguments: list[Any] = [_pointer(array) for array in (dst, src, sizes)]
        arguments += [ctypes.c_size_t(dst.size), attributes, ctypes.byref(first)]
        arguments += [ctypes.c_size_t(1)]
        if name == "cuMemcpyBatchAsync":
            arguments.append(ctypes.byref(failed))
        self._call(name, *arguments, self._stream)

    def transfer(self, num_bytes: int, path: str) -> Transfer:
        """What has been queued, to be waited for."""
        return _StreamTransfer(self, num_bytes, path)

    def is_done(self) -> bool:
        """Whether all that was queued is complete."""
        status: int = self._driver.cuStreamQuery(self._stream)
        if status != _NOT_READY:
            self._require(status, "cuStreamQuery")
        return status != _NOT_READY

    def close(self) -> None:
        """Wait for what is queued and give up stream and context; may be called more than once."""
        if self._stream:
            self._call("cuStreamSynchronize", self._stream)
            self._call("cuStreamDestroy_v2", self._stream)
            self._call("cuDevicePrimaryCtxRelease_v2", self._device)
            self._stream = ctypes.c_void_p()

    def _call(self, name: str, *arguments: Any) -> None:
        self._require(getattr(self._driver, name)(*arguments), name)

    def _require(self, status: int, name: str) -> None:
        require_ok(status, name)


class _StreamTransfer(Transfer):
    sequence = 0

    def __init__(self, stream: CudaStream, num_bytes: int, path: str) -> None:
        self._stream = stream
        self.num_bytes = num_bytes
        self.actual_path = path

    def poll(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self._stream.is_done():
            if time.monotonic() >= deadline:
                return False
        return True


def load_driver() -> ctypes.CDLL:
    """The CUDA driver.

    Raises:
        NotAvailable: there is none.
        CudaError: it does not start.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NotAvailable(f"no CUDA driver: {error}") from error
    require_ok(driver.cuInit(0), "cuInit")
    return driver


def use_device(driver: ctypes.CDLL, device: int) -> ctypes.c_int:
    """Make the primary context of a GPU this thread's; returns the driver's handle of the GPU.

    Raises:
        CudaError: a call failed.
    """
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    require_ok(driver.cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    retain = driver.cuDevicePrimaryCtxRetain
    require_ok(retain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    require_ok(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return handle


def require_ok(status: int, name: str) -> None:
    """Raise where a call of the driver failed.

    Raises:
        CudaError: it did; has its status.
    """
    if status:
        raise CudaError(f"{name} failed with status {status}", status)


def _pointer(array: NDArray[np.uint64]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
