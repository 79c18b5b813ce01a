"""Arrays of libraries that are not here: DLPack capsules and array interfaces made by hand."""

import ctypes
from typing import Any

import numpy as np

CPU, CUDA, CUDA_HOST, VULKAN = 1, 2, 3, 7
_UNSIGNED = 1  # DLPack's code of unsigned integers


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("num_dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [
        ("tensor", _DLTensor),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class FakeTensor:
    """A producer of one DLPack capsule with every field as given; nothing is behind the address."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        *,
        bits: int = 16,
        lanes: int = 1,
        strides: tuple[int, ...] | None = None,
        byte_offset: int = 0,
        device: tuple[int, int] = (CPU, 0),
        capsule_name: bytes = b"dltensor",
    ) -> None:
        self.shape = shape
        self.streams: list[Any] = []  # what each call asked to be ordered after
        self._device = device
        # Kept here, because a capsule only points at them.
        self._name = capsule_name
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * len(shape))(*strides)
        self._managed = _DLManagedTensor(
            _DLTensor(
                address,
                *device,
                len(shape),
                _UNSIGNED,
                bits,
                lanes,
                self._shape,
                self._strides,
                byte_offset,
            ),
            None,
            None,
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        return _new_capsule(ctypes.addressof(self._managed), self._name, None)


class FakeCudaArray:
    """An array with ``__cuda_array_interface__`` alone, as older libraries give."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str, **fields: Any) -> None:
        self.shape = shape
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "version": 3,
        } | fields


class DlpackOnly:
    """A numpy array seen through DLPack alone, as torch's is."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape = array.shape

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)


def aligned(num_bytes: int, *, shift: int = 0) -> Any:
    """Zeroed uint8 memory that starts ``shift`` bytes behind a multiple of 64."""
    memory = np.zeros(num_bytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + shift
    return memory[start : start + num_bytes]
