"""`shm`: CPU processes on one host.

Two ways, chosen by where the peer's pages lie:

* every region in a shared segment: both processes map it and the paged copy stores straight into
  the peer's pages;
* any region in private memory: cross-memory attach (``process_vm_writev`` and ``readv``), where the
  kernel's ptrace rules allow it.

Before the first use of cross-memory attach, and again before each copy, the peer's identity is
checked: a process id alone may meanwhile belong to somebody else's memory.
"""

import os
import secrets
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from kvxfer import _core
from kvxfer.errors import InvalidUsage, PeerLost, ProtocolMismatch
from kvxfer.layout import CopyPlan
from kvxfer.memory import KVCache, MemoryKind, Registration, find_segment
from kvxfer.memory.wire import Address, Descriptor, NumBytes, OffsetBytes
from kvxfer.transport import tuned
from kvxfer.transport.base import (
    Availability,
    Capabilities,
    Export,
    Link,
    Op,
    Transport,
)
from kvxfer.transport.board import PeerSlot, decode_spec
from kvxfer.transport.host_copy import HostLink, copy_mapped, plan_tables
from kvxfer.transport.process import ProcessSpec

_COOKIE_BYTES = 16


class SegmentSpec(msgspec.Struct, frozen=True):
    """Where a range lies in a shared segment: its descriptor, its length, and the offset in it."""

    fd: Descriptor
    num_bytes: NumBytes
    offset_bytes: OffsetBytes


class _RegionSpec(msgspec.Struct, frozen=True):
    process: ProcessSpec
    address: Address
    num_bytes: NumBytes
    cookie_address: Address
    cookie: Annotated[bytes, msgspec.Meta(min_length=_COOKIE_BYTES, max_length=_COOKIE_BYTES)]
    segment: SegmentSpec | None


class _ShmExport(Export):
    def __init__(self, registration: Registration) -> None:
        buffer = registration.buffer
        found = find_segment(buffer.address, buffer.num_bytes)
        self._cookie = np.frombuffer(bytearray(secrets.token_bytes(_COOKIE_BYTES)), np.uint8)
        self._keep = (registration, found)
        self.metadata = msgspec.msgpack.encode(
            _RegionSpec(
                process=ProcessSpec.own(),
                address=buffer.address,
                num_bytes=buffer.num_bytes,
                cookie_address=self._cookie.ctypes.data,
                cookie=self._cookie.tobytes(),
                segment=None
                if found is None
                else SegmentSpec(found[0].fd, found[0].num_bytes, found[1]),
            )
        )

    def close(self) -> None:
        self._cookie[:] = 0  # a peer that still holds the metadata is refused from now on


def _require_cookie(pool: _core.WorkerPool, region: _RegionSpec) -> None:
    found = np.zeros(_COOKIE_BYTES, np.uint8)
    probe = CopyPlan.contiguous(region.cookie_address, found.ctypes.data, _COOKIE_BYTES)
    _core.paged_copy_process_vm(pool, plan_tables(probe), region.process.pid, False)
    if not secrets.compare_digest(found.tobytes(), region.cookie):
        raise PeerLost(
            f"the region at {region.address:#x} of process {region.process.pid} was withdrawn"
        )


class _MappedLink(HostLink):
    path = "shared segment"

    def __init__(
        self, regions: Sequence[_RegionSpec], slot: PeerSlot, num_threads: int | None
    ) -> None:
        super().__init__(slot, num_threads, tuned.section("shm", "shared"))
        self._segments: dict[tuple[int, int], _core.SharedSegment] = {}
        self.region_addresses = np.array([self._map(region) for region in regions], np.uint64)
        self.region_bytes = [region.num_bytes for region in regions]

    def _map(self, region: _RegionSpec) -> int:
        spec = region.segment
        if spec is None or spec.offset_bytes + region.num_bytes > spec.num_bytes:
            raise ProtocolMismatch(
                f"a region of {region.num_bytes} bytes does not lie in its segment {spec}"
            )
        key = (region.process.pid, spec.fd)
        segment = self._segments.get(key)
        if segment is None:
            segment = self._segments[key] = _core.SharedSegment.open(*key, spec.num_bytes)
        if segment.num_bytes != spec.num_bytes:
            raise ProtocolMismatch(
                f"descriptor {spec.fd} of process {region.process.pid} is {segment.num_bytes} "
                f"bytes for one region and {spec.num_bytes} for another"
            )
        return segment.address + spec.offset_bytes

    def _unmap(self) -> None:
        self._segments.clear()

    def _copy(self, plan: CopyPlan, op: Op, engine: str) -> str:
        return f"{self.path}, {copy_mapped(self._workers, plan, engine)}"


class _AttachedLink(HostLink):
    path = "cross-memory attach"

    def __init__(
        self, regions: Sequence[_RegionSpec], slot: PeerSlot, num_threads: int | None
    ) -> None:
        super().__init__(slot, num_threads, tuned.section("shm", "private"))
        for region in regions:
            _require_cookie(self._workers, region)
        self.region_addresses = np.array([region.address for region in regions], np.uint64)
        self.region_bytes = [region.num_bytes for region in regions]

    def _copy(self, plan: CopyPlan, op: Op, engine: str) -> str:
        if engine != "auto":
            raise InvalidUsage(f"engine {engine!r} with private memory; only auto is possible")
        writes = op is Op.PUT
        if plan.num_pages:
            pid = self._slot.process.pid
            _core.paged_copy_process_vm(self._workers, plan_tables(plan), pid, writes)
        return f"{self.path}, {'process_vm_writev' if writes else 'process_vm_readv'}"


class ShmTransport(Transport):
    """Shared segments and cross-memory attach between processes of one host."""

    name = "shm"
    capabilities = Capabilities(frozenset({MemoryKind.HOST}), cross_process=True)

    def __init__(self, num_threads: int | None = None) -> None:
        """Copy with ``num_threads`` threads, the caller's included; None = the measured best."""
        self._num_threads = num_threads

    @classmethod
    def probe(cls) -> Availability:
        """Linux only: memfd and /proc."""
        if not os.path.exists("/proc/self/fd"):  # noqa: PTH110 - pathlib says the same, longer
            return Availability(False, "no /proc, by which processes open each other's fds")
        return Availability(True)

    def export(self, registration: Registration) -> Export:
        """Describe a range of host memory to peers of this host."""
        if registration.buffer.kind is not MemoryKind.HOST:
            raise InvalidUsage(
                f"shm moves host memory; this buffer is on CUDA device "
                f"{registration.buffer.device}: use the nvlink transport"
            )
        return _ShmExport(registration)

    def link(self, cache: KVCache, regions: Sequence[bytes], board: bytes) -> Link:
        """Map the peer's segments, or check that its private memory can be reached."""
        if cache.device >= 0:
            raise InvalidUsage(
                f"shm moves host memory; this cache is on CUDA device {cache.device}: use the "
                "nvlink transport"
            )
        specs = [decode_spec(region, _RegionSpec) for region in regions]
        slot = PeerSlot(board)
        if any(spec.process != slot.process for spec in specs):
            raise ProtocolMismatch("the regions and the board name different processes")
        if all(spec.segment is not None for spec in specs):
            return _MappedLink(specs, slot, self._num_threads)
        return _AttachedLink(specs, slot, self._num_threads)
