"""`nvlink`: GPUs with peer access on one host.

The peer's allocations are mapped once (:mod:`kvxfer.memory.ipc`); a copy is one kernel that
computes every address from the plan's tables, or the copy engine where runs are long. Which
physical path lies under the mapping is read back from NVML and said in every transfer's
``actual_path``.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from kvxfer import _core
from kvxfer.errors import InvalidUsage, NotAvailable, ProtocolMismatch
from kvxfer.memory import KVCache, MemoryKind, Registration
from kvxfer.memory.ipc import DeviceExport, DeviceRegionSpec, import_region
from kvxfer.transport import tuned
from kvxfer.transport.base import Availability, Capabilities, Export, Link, Transport
from kvxfer.transport.board import PeerSlot, decode_spec
from kvxfer.transport.device_copy import DeviceLink
from kvxfer.transport.process import ProcessSpec
from kvxfer.transport.topology import gpu_path, visible_device


class _RegionSpec(msgspec.Struct, frozen=True):
    process: ProcessSpec
    region: DeviceRegionSpec


class _NvlinkExport(Export):
    def __init__(self, registration: Registration) -> None:
        self._device_export: DeviceExport | None = DeviceExport(registration)
        self.metadata = msgspec.msgpack.encode(
            _RegionSpec(ProcessSpec.own(), self._device_export.spec)
        )

    def close(self) -> None:
        self._device_export = None


class _NvlinkLink(DeviceLink):
    """A device link that keeps the peer's allocations mapped."""

    def __init__(self, device: int, specs: Sequence[_RegionSpec], slot: PeerSlot) -> None:
        remote = require_peer_access(device, specs[0].region.device_uuid)
        found = gpu_path(device, remote)
        self.physical_limit_gb_per_s = found.limit_gb_per_s
        imports = [import_region(spec.region, spec.process.identity(), device) for spec in specs]
        super().__init__(
            device,
            slot,
            region_addresses=np.array([address for _, address in imports], np.uint64),
            region_bytes=[spec.region.num_bytes for spec in specs],
            path=found.name,
            section=tuned.section("nvlink", "device"),
        )
        # After the copier's, so that a link which is dropped unclosed lets the copies end first.
        self._mappings = [mapping for mapping, _ in imports]

    def close(self) -> None:
        super().close()
        self._mappings.clear()


def require_peer_access(device: int, uuid: str) -> int:
    """The index of the peer's GPU in this process, whose memory ``device`` may map.

    Raises:
        NotAvailable: it is not among this process's GPUs, or the two have no peer access.
    """
    remote = visible_device(uuid)
    if remote is None:
        raise NotAvailable(
            f"the peer's GPU {uuid} is not visible to this process; add it to CUDA_VISIBLE_DEVICES "
            "(its own GPU first), since a mapping needs both"
        )
    if not _core.can_access_peer(device, remote):
        raise NotAvailable(
            f"GPU {device} has no peer access to GPU {remote}; use a transport through host "
            "memory or the network"
        )
    return remote


class NvlinkTransport(Transport):
    """Paged copies between GPUs that map each other's memory."""

    name = "nvlink"
    capabilities = Capabilities(frozenset({MemoryKind.DEVICE}), cross_process=True)

    @classmethod
    def probe(cls) -> Availability:
        """A CUDA build, a driver and a GPU."""
        if _core.device_count() == 0:
            return Availability(False, _core.no_device_reason())
        return Availability(True)

    def export(self, registration: Registration) -> Export:
        """Make a range of device memory openable by other processes of this host."""
        if registration.buffer.kind is not MemoryKind.DEVICE:
            raise InvalidUsage("nvlink moves device memory; this buffer is host memory: use shm")
        return _NvlinkExport(registration)

    def link(self, cache: KVCache, regions: Sequence[bytes], board: bytes) -> Link:
        """Map the peer's allocations for this cache's GPU."""
        if cache.device < 0:
            raise InvalidUsage("nvlink moves device memory; this cache is host memory: use shm")
        specs = [decode_spec(region, _RegionSpec) for region in regions]
        slot = PeerSlot(board)
        if any(spec.process == ProcessSpec.own() for spec in specs):
            raise NotAvailable(
                "a CUDA IPC handle cannot be opened in the process that exported it; use loopback"
            )
        if not specs or any(spec.process != slot.process for spec in specs):
            raise ProtocolMismatch(
                f"{len(specs)} regions of other processes than the board's; a peer sends its own"
            )
        return _NvlinkLink(cache.device, specs, slot)
