"""Device memory of another process: what crosses the wire, and one mapping an allocation.

A mapping is keyed by what cannot repeat: the exporting process (id, start time, namespace), CUDA's
buffer id of the allocation, its handle or descriptors, and the local device. An address is no key:
it may belong to another allocation by now. Regions in one allocation share one mapping, which
closes with the last of them.
"""

import threading
import weakref
from collections.abc import Hashable
from typing import Annotated

import msgspec

from kvxfer import _core
from kvxfer.errors import ProtocolMismatch
from kvxfer.memory.registration import Registration
from kvxfer.memory.wire import Descriptor, NumBytes, OffsetBytes


class DeviceRegionSpec(msgspec.Struct, frozen=True):
    """An exported device range.

    Attributes:
        device_uuid: the GPU, named the same in every process.
        buffer_id: CUDA's id of the allocation in the exporting process.
        offset_bytes: where the range starts in the mapped allocation.
        num_bytes: length of the range.
        legacy_handle: 64 bytes for memory from cudaMalloc, empty for VMM memory.
        chunk_bytes: sizes of the allocation's chunks; one for cudaMalloc memory.
        chunk_fds: a descriptor of the exporting process for each VMM chunk.
    """

    device_uuid: Annotated[str, msgspec.Meta(max_length=64)]
    buffer_id: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    offset_bytes: OffsetBytes
    num_bytes: NumBytes
    legacy_handle: Annotated[bytes, msgspec.Meta(max_length=64)]
    chunk_bytes: Annotated[list[NumBytes], msgspec.Meta(min_length=1, max_length=65536)]
    chunk_fds: Annotated[list[Descriptor], msgspec.Meta(max_length=65536)]


class DeviceExport:
    """Keeps a device range openable; its descriptors close with it."""

    def __init__(self, registration: Registration) -> None:
        """Export the range of ``registration``.

        Raises:
            RegistrationError: the memory is dead or cannot be exported.
        """
        buffer = registration.buffer
        self._native = _core.IpcExport(buffer.address, buffer.num_bytes)
        self._registration = registration
        self.spec = DeviceRegionSpec(
            device_uuid=_core.device_info(self._native.device).uuid,
            buffer_id=self._native.buffer_id,
            offset_bytes=self._native.offset_bytes,
            num_bytes=buffer.num_bytes,
            legacy_handle=self._native.legacy_handle,
            chunk_bytes=self._native.chunk_bytes,
            chunk_fds=self._native.chunk_fds,
        )


_LOCK = threading.Lock()
_MAPPINGS: "weakref.WeakValueDictionary[Hashable, _core.IpcMapping]" = weakref.WeakValueDictionary()


def import_region(
    spec: DeviceRegionSpec, process: _core.ProcessIdentity, device: int
) -> tuple[_core.IpcMapping, int]:
    """Map a peer's range for local GPU ``device``; returns the mapping and the range's address.

    Keep the mapping for as long as the address is used.

    Raises:
        ProtocolMismatch: the range does not lie in its allocation.
        CudaError: the driver refuses the handle.
        NotAvailable: the peer's descriptors cannot be taken.
    """
    if spec.offset_bytes + spec.num_bytes > sum(spec.chunk_bytes):
        raise ProtocolMismatch(
            f"a region of {spec.num_bytes} bytes at offset {spec.offset_bytes} passes the end of "
            f"an allocation of {sum(spec.chunk_bytes)} bytes"
        )
    key = (
        process.pid,
        process.start_ticks,
        process.pid_namespace,
        spec.buffer_id,
        spec.legacy_handle,
        tuple(spec.chunk_fds),
        device,
    )
    with _LOCK:
        mapping = _MAPPINGS.get(key)
        if mapping is None:
            mapping = _open(spec, process, device)
            _MAPPINGS[key] = mapping
    if mapping.num_bytes < spec.offset_bytes + spec.num_bytes:
        raise ProtocolMismatch(
            f"the allocation was mapped with {mapping.num_bytes} bytes; the region ends at "
            f"{spec.offset_bytes + spec.num_bytes}"
        )
    return mapping, mapping.address + spec.offset_bytes


def _open(spec: DeviceRegionSpec, process: _core.ProcessIdentity, device: int) -> _core.IpcMapping:
    if spec.legacy_handle:
        return _core.IpcMapping.open_legacy(device, spec.legacy_handle, spec.chunk_bytes[0])
    return _core.IpcMapping.open_chunks(device, process.pid, spec.chunk_fds, spec.chunk_bytes)
