"""Linked caches on GPUs, and a native copier by itself."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cuda_driver
import numpy as np
from cache_content import CacheShape, shape
from copy_boxes import CopyBox, core_tables
from device_host import DeviceHost
from peer_process import DEADLINE_S, ChildProcess, RemotePeer

from kvxfer import Peer, _core
from kvxfer.memory import create_segment
from kvxfer.transport import Op
from kvxfer.transport.host_copy import plan_tables

LOCAL_SEED = 1
REMOTE_SEED = 2
_PROGRAM = Path(__file__).with_name("device_host.py")


class DeviceChild(ChildProcess):
    """A process with a `DeviceHost`."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        super().__init__(_PROGRAM, env)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


@dataclass(frozen=True)
class GpuPair:
    """Two linked caches on GPUs: this side's, which copies, and the far one."""

    local: DeviceHost
    remote: RemotePeer
    peer: Peer
    opened: dict[str, Any]

    def put(self, local_ids: list[int], remote_ids: list[int], **options: Any) -> str:
        """Put, note what should have come of it, and return the path."""
        transfer = self.peer.put(local_ids, remote_ids, **options)
        transfer.wait(DEADLINE_S)
        self.remote.call("copied_in", src_seed=LOCAL_SEED, src_ids=local_ids, dst_ids=remote_ids)
        return transfer.actual_path

    def get(self, remote_ids: list[int], local_ids: list[int], **options: Any) -> str:
        """Get, note what should have come of it, and return the path."""
        transfer = self.peer.get(remote_ids, local_ids, **options)
        transfer.wait(DEADLINE_S)
        self.local.copied_in(REMOTE_SEED, remote_ids, local_ids)
        return transfer.actual_path

    def check(self) -> None:
        """Every byte of both sides, guards included."""
        for side, problem in (("far", self.remote.call("problem")), ("near", self.local.problem())):
            assert not problem, f"{side} side: {problem}"

    def signalled(self, sequence: int, timeout_s: float = 0.0) -> bool:
        """Whether the far side was told of this side's transfer ``sequence``."""
        told: bool = self.remote.call(
            "wait",
            incarnation=self.local.endpoint.incarnation,
            sequence=sequence,
            timeout_s=timeout_s,
        )
        return told

    def post_faulty(
        self,
        local_ids: list[int],
        remote_ids: list[int],
        fault: _core.CopyFault,
        engine: _core.CopyEngine = _core.CopyEngine.AUTO,
    ) -> None:
        """Put with a planted fault; not waited for."""
        link: Any = self.peer.link
        plan = self.peer.plan(Op.PUT, local_ids, remote_ids)
        sequence = link._slot.next_sequence()
        link.copier.post(
            plan_tables(plan), link._slot.slot, sequence, num_sms=8, engine=engine, fault=fault
        )


@contextmanager
def linked_devices(
    remote: RemotePeer,
    remote_shape: CacheShape | None = None,
    local_shape: CacheShape | None = None,
    *,
    memory: str = "cuda",
    local_memory: str | None = None,
    transport: str = "nvlink",
    local_transport: Any = None,
    devices: tuple[int, int] = (0, 0),
    remote_seed: int | None = REMOTE_SEED,
) -> Iterator[GpuPair]:
    """Open a cache on both sides and connect; ``devices`` are this side's GPU and the far one.

    ``local_transport`` is this side's, with settings of its own.
    """
    remote_shape = remote_shape or shape()
    own = local_shape or remote_shape
    opened = remote.open(
        remote_shape, memory=memory, transport=transport, device=devices[1], seed=remote_seed
    )
    local = DeviceHost()
    try:
        local.open(
            layout=own.fields,
            num_blocks=own.num_blocks,
            num_arrays=own.num_arrays,
            memory=local_memory or memory,
            transport=local_transport or transport,
            device=devices[0],
            seed=LOCAL_SEED,
        )
        with local.endpoint.connect(opened["addresses"]) as peer:
            yield GpuPair(local, remote, peer, opened)
    finally:
        # Nothing may be in flight to memory that goes now, whatever a test has planted.
        cuda_driver.synchronize(devices[0])
        local.close()
        remote.release()


class RawCopier:
    """A native copier with a board of its own, for plans that no cache allows."""

    def __init__(self, device: int = 0) -> None:
        num_slots = 4
        board = create_segment(num_slots * _core.CompletionBoard.SLOT_BYTES)
        self.native = _core.DeviceCopier(device, board.address, num_slots)
        self._board = board  # goes after the copier, which has it registered
        self.sequence = 0

    def post(self, tables: _core.PlanTables, **options: Any) -> _core.CopyEngine:
        engine = self.native.post(tables, 0, self.sequence + 1, **options)
        self.sequence += 1
        return engine

    def wait(self) -> None:
        """Wait for everything posted."""
        assert self.native.wait(0, self.sequence, DEADLINE_S)

    def run(self, tables: _core.PlanTables, **options: Any) -> _core.CopyEngine:
        engine = self.post(tables, **options)
        self.wait()
        return engine


class RawMemory:
    """Device memory and the bytes that it should hold."""

    def __init__(self, num_bytes: int, seed: int, device: int = 0) -> None:
        self._buffer = _core.DeviceBuffer(device, num_bytes)
        self._device = device
        self.address = self._buffer.address
        self.fill(seed)

    def fill(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.model = random.integers(0, 256, self._buffer.num_bytes, dtype=np.uint8)
        cuda_driver.write(self._device, self.address, self.model)

    def check(self) -> None:
        found = cuda_driver.read(self._device, self.address, self._buffer.num_bytes)
        wrong = np.flatnonzero(found != self.model)
        assert wrong.size == 0, f"{wrong.size} bytes are wrong, the first at {wrong[0]}"


def words(*values: int) -> Any:
    """A table of a plan."""
    return np.array(values, dtype=np.uint64)


def page_tables(
    src_planes: Any, dst_planes: Any, segments: Any, page_bytes: int, strides: tuple[int, int]
) -> _core.PlanTables:
    """Contiguous pages: segments are uint32 ``[n, 4]`` of blocks ``strides`` bytes apart."""
    box = CopyBox(
        first_plane=0,
        num_planes=len(src_planes),
        first_segment=0,
        num_segments=len(segments),
        src_block_stride=strides[0],
        dst_block_stride=strides[1],
        run_bytes=page_bytes,
    )
    return core_tables(src_planes, dst_planes, segments, [box])


def copy_model(
    src: RawMemory,
    dst: RawMemory,
    planes: list[tuple[int, int]],
    blocks: list[tuple[int, int]],
    page_bytes: int,
) -> _core.PlanTables:
    """Note in ``dst`` what a plan should do, and return the plan.

    ``planes`` and ``blocks`` are pairs of byte offsets, of source and destination.
    """
    for src_plane, dst_plane in planes:
        for src_block, dst_block in blocks:
            begin, end = src_plane + src_block, dst_plane + dst_block
            dst.model[end : end + page_bytes] = src.model[begin : begin + page_bytes]
    # The longest stride that reaches all pages: what it divides by says how pages are aligned.
    src_stride, dst_stride = (math.gcd(*offsets) or 1 for offsets in zip(*blocks, strict=True))
    segments = np.array(
        [(begin // src_stride, end // dst_stride, 0, 0) for begin, end in blocks], np.uint32
    )
    return page_tables(
        words(*(src.address + plane for plane, _ in planes)),
        words(*(dst.address + plane for _, plane in planes)),
        segments,
        page_bytes,
        (src_stride, dst_stride),
    )
