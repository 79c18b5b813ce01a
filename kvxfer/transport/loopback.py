"""`loopback`: both sides in one process. For tests, plans and a first look without a peer."""

import itertools
import weakref
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from kvxfer.errors import NotAvailable, PeerLost
from kvxfer.layout import CopyPlan
from kvxfer.memory import KVCache, MemoryKind, Registration
from kvxfer.memory.wire import Address, Device, NumBytes
from kvxfer.transport.base import (
    Availability,
    Capabilities,
    Export,
    Link,
    Op,
    Transport,
)
from kvxfer.transport.board import PeerSlot, decode_spec
from kvxfer.transport.device_copy import DeviceLink
from kvxfer.transport.host_copy import HostLink, copy_mapped
from kvxfer.transport.process import ProcessSpec
from kvxfer.tuning import NO_SECTION


class _RegionSpec(msgspec.Struct, frozen=True):
    process: ProcessSpec
    address: Address
    num_bytes: NumBytes
    device: Device
    export: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


# What may be linked to: an address off the wire alone is not taken.
_EXPORTED: "weakref.WeakValueDictionary[_RegionSpec, _LoopbackExport]"
_EXPORTED = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class _LoopbackExport(Export):
    def __init__(self, registration: Registration) -> None:
        buffer = registration.buffer
        self._keep = registration
        self._spec = _RegionSpec(
            ProcessSpec.own(), buffer.address, buffer.num_bytes, buffer.device, next(_NUMBERS)
        )
        self.metadata = msgspec.msgpack.encode(self._spec)
        _EXPORTED[self._spec] = self

    def close(self) -> None:
        _EXPORTED.pop(self._spec, None)


class _HostLoopbackLink(HostLink):
    path = "one process"

    def __init__(
        self, regions: Sequence[_RegionSpec], slot: PeerSlot, num_threads: int | None
    ) -> None:
        super().__init__(slot, num_threads, NO_SECTION)
        self.region_addresses = np.array([region.address for region in regions], np.uint64)
        self.region_bytes = [region.num_bytes for region in regions]

    def _copy(self, plan: CopyPlan, op: Op, engine: str) -> str:
        return f"{self.path}, {copy_mapped(self._workers, plan, engine)}"


class LoopbackTransport(Transport):
    """Copies within one process, on the CPU or on one GPU."""

    name = "loopback"
    capabilities = Capabilities(frozenset(MemoryKind), cross_process=False)

    def __init__(self, num_threads: int | None = None) -> None:
        """Copy host memory with ``num_threads`` threads; None = all CPUs, at most 8."""
        self._num_threads = num_threads

    @classmethod
    def probe(cls) -> Availability:
        """Always there."""
        return Availability(True)

    def export(self, registration: Registration) -> Export:
        """Describe a range to this same process."""
        return _LoopbackExport(registration)

    def link(self, cache: KVCache, regions: Sequence[bytes], board: bytes) -> Link:
        """Link two caches of this process."""
        specs = [decode_spec(region, _RegionSpec) for region in regions]
        slot = PeerSlot(board)
        if any(spec.process != ProcessSpec.own() for spec in specs):
            raise NotAvailable("loopback stays in one process; use shm or nvlink between two")
        for spec in specs:
            if spec not in _EXPORTED:
                raise PeerLost(f"the region at {spec.address:#x} was withdrawn, or never exported")
        if any(spec.device != cache.device for spec in specs):
            raise NotAvailable(
                "loopback joins host to host memory, or memory of one GPU; use nvlink between two "
                "processes"
            )
        if cache.device < 0:
            return _HostLoopbackLink(specs, slot, self._num_threads)
        return DeviceLink(
            cache.device,
            slot,
            region_addresses=np.array([spec.address for spec in specs], np.uint64),
            region_bytes=[spec.num_bytes for spec in specs],
            path="one process",
        )
