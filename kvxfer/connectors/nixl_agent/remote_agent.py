"""Another accelerated agent of this host, and how its memory is reached from here."""

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer import _core
from kvxfer.closing import Closing
from kvxfer.connectors.nixl_agent.facts import SECRET_BYTES, AgentFacts, RegionFacts
from kvxfer.connectors.nixl_agent.ledger import map_ledger
from kvxfer.errors import PeerLost, ProtocolMismatch
from kvxfer.layout import CopyPlan
from kvxfer.memory import MemoryKind
from kvxfer.memory.ipc import import_region
from kvxfer.transport.host_copy import plan_tables
from kvxfer.transport.nvlink import require_peer_access
from kvxfer.transport.process import ProcessSpec, ProcessWatch

_U64 = (1 << 64) - 1
HOST_DEVICE = -1


@dataclass(frozen=True)
class Reach:
    """Ranges of memory as copies of this process find them.

    Attributes:
        ranges: uint64 ``[n, 3]``: begin, end, and what is added to an address in between.
        regions: whose they are, in the same order.
        attached_pid: the process whose private memory they are; 0 where they are mapped here.
        keep: the mappings.
    """

    ranges: NDArray[np.uint64]
    regions: list[RegionFacts]
    attached_pid: int = 0
    keep: tuple[object, ...] = ()


def reach_of(regions: list[RegionFacts], shifts: list[int], **more: object) -> Reach:
    """Regions, sorted by address, with what is added to the addresses in each."""
    ranges = np.array(
        [
            (region.address, region.address + region.num_bytes, shift & _U64)
            for region, shift in zip(regions, shifts, strict=True)
        ],
        np.uint64,
    ).reshape(-1, 3)
    return Reach(ranges, regions, **more)  # type: ignore[arg-type]


class RemoteAgent(Closing):
    """An agent that was met. All methods may be called from several threads.

    Attributes:
        name: NIXL's.
        words: of its ledger, for :class:`kvxfer.connectors.nixl_agent.ledger.Standing`.
        is_closed: whether it was removed.
    """

    def __init__(self, name: str, facts: AgentFacts) -> None:
        """Check that ``facts`` are those of a process of this host.

        Raises:
            KvxferError: they are not, or it may not be reached; the message says why.
        """
        self.name = name
        self.is_closed = False
        self._process = facts.process
        self._is_here = facts.process == ProcessSpec.own()
        self._secret, self._ledger_address = facts.secret, facts.ledger_address
        self._ledger, self.words = map_ledger(facts)
        self._watch = ProcessWatch(facts.process.identity())
        self._lock = threading.Lock()
        self._regions: dict[int, RegionFacts] = {}
        self._reached: dict[tuple[MemoryKind, int, int], Reach] = {}
        self.learn(facts)

    def learn(self, facts: AgentFacts) -> None:
        """Add the regions of later metadata of the same agent; a slot's later one replaces it."""
        with self._lock:
            self._regions.update((region.slot, region) for region in facts.regions)
            self._reached.clear()

    def is_same(self, facts: AgentFacts) -> bool:
        """Whether ``facts`` are of this incarnation of the agent."""
        return (facts.process, facts.secret) == (self._process, self._secret)

    def require_alive(self) -> None:
        """Check that it was not removed and its process runs.

        Raises:
            PeerLost: it is gone.
        """
        if self.is_closed or self._watch.has_ended:
            raise PeerLost(
                f"NIXL agent {self.name} in process {self._process.pid} is gone; exchange metadata "
                "again"
            )

    def reach(self, kind: MemoryKind, device: int, near_device: int) -> Reach:
        """How one memory of the peer is reached.

        Args:
            kind: of memory.
            device: NIXL's device id there.
            near_device: the GPU of this process that copies; -1 for host memory.

        Raises:
            KvxferError: it is not, and why.
        """
        key = (kind, device, near_device)
        with self._lock:
            found = self._reached.get(key)
            if found is None:
                found = self._reached[key] = self._open(kind, device, near_device)
        return found

    def _open(self, kind: MemoryKind, device: int, near_device: int) -> Reach:
        in_device = kind is MemoryKind.DEVICE
        regions = sorted(
            (
                region
                for region in self._regions.values()
                if region.device == device and (region.exported is not None) == in_device
            ),
            key=lambda region: region.address,
        )
        if in_device:
            return self._open_device(regions, near_device)
        nowhere = [0] * len(regions)
        if self._is_here:
            return reach_of(regions, nowhere)
        if all(region.segment is not None for region in regions):
            return self._map(regions)
        self._require_attach()
        return reach_of(regions, nowhere, attached_pid=self._process.pid)

    def _map(self, regions: list[RegionFacts]) -> Reach:
        segments: dict[int, _core.SharedSegment] = {}
        shifts = []
        for region in regions:
            spec = region.segment
            if spec is None or spec.offset_bytes + region.num_bytes > spec.num_bytes:
                raise ProtocolMismatch(
                    f"a region of {region.num_bytes} bytes does not lie in its segment {spec}"
                )
            if spec.fd not in segments:
                segments[spec.fd] = _core.SharedSegment.open(
                    self._process.pid, spec.fd, spec.num_bytes
                )
            mapped = segments[spec.fd]
            if mapped.num_bytes < spec.offset_bytes + region.num_bytes:
                raise ProtocolMismatch(f"segment {spec} has {mapped.num_bytes} bytes")
            shifts.append(mapped.address + spec.offset_bytes - region.address)
        return reach_of(regions, shifts, keep=tuple(segments.values()))

    def _require_attach(self) -> None:
        """Read the secret as copies will read pages: by the process's id, at its address."""
        found = np.zeros(SECRET_BYTES, np.uint8)
        probe = CopyPlan.contiguous(self._ledger_address, found.ctypes.data, SECRET_BYTES)
        _core.paged_copy_process_vm(
            _core.WorkerPool(1), plan_tables(probe), self._process.pid, False
        )
        if found.tobytes() != self._secret:
            raise PeerLost(f"process {self._process.pid} has no ledger where its metadata says")

    def _open_device(self, regions: list[RegionFacts], near_device: int) -> Reach:
        shifts, keep = [], []
        for region in regions:
            spec = region.exported
            assert spec is not None
            far_device = require_peer_access(near_device, spec.device_uuid)
            if self._is_here:  # an IPC handle cannot be opened by the process that exported it
                if near_device != far_device:
                    _core.enable_peer_access(near_device, far_device)
                shifts.append(0)
                continue
            mapping, address = import_region(spec, self._process.identity(), near_device)
            keep.append(mapping)
            shifts.append(address - region.address)
        return reach_of(regions, shifts, keep=tuple(keep))

    def close(self) -> None:
        """Refuse what comes later; mappings go with the lists that were prepared over them."""
        self.is_closed = True
        self._watch.close()
        with self._lock:
            self._reached.clear()
