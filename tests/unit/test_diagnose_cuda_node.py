"""The GPUs' areas, plans and checks, with host memory in place of GPUs and their copiers."""

import ctypes
import itertools
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest

from kvxfer import _core
from kvxfer.diagnose.facts import PcieLink
from kvxfer.diagnose.figures import ENGINE, KERNEL, PAGED, PINNED
from kvxfer.diagnose.measure import cuda_node, host_device
from kvxfer.diagnose.measure.cuda_node import CudaNode
from kvxfer.diagnose.measure.events import BusyPcie, Event, Measured, Task
from kvxfer.diagnose.measure.host_device import measure_host_device
from kvxfer.diagnose.measure.node import PAGE_BYTES, Copy
from kvxfer.diagnose.measure.schedule import Schedule
from kvxfer.errors import NotAvailable, TransferTimeout

AREA_BYTES = 64 * PAGE_BYTES
POOL = _core.WorkerPool(1)


class Buffer:
    def __init__(self, device: int, num_bytes: int) -> None:
        self._data = np.zeros(num_bytes, np.uint8)
        self.address = int(self._data.ctypes.data)


class Copier:
    """Copies at once; where ``hangs`` is set its completions never come."""

    hangs = False

    def __init__(self, device: int, board_address: int, board_slots: int) -> None:
        self.device = device
        self.posted: list[tuple[object, object]] = []

    def post(self, tables: _core.PlanTables, slot: int, sequence: int, *how: object) -> object:
        assert sequence == len(self.posted) + 1
        _core.paged_copy_host(POOL, tables, False)
        self.posted.append((how[1], how[0]))
        return how[1]

    def wait(self, slot: int, sequence: int, timeout_s: float) -> bool:
        return not self.hangs


def chase(device: int, address: int, num_slots: int, stride: int, hops: int) -> SimpleNamespace:
    ring = np.ctypeslib.as_array(
        (ctypes.c_uint64 * (num_slots * stride // 8)).from_address(address)
    )
    index = 0
    for _ in range(hops):
        index = int(ring[index * stride // 8])
    return SimpleNamespace(last_index=index, ns_per_hop=900.0)


def core(**changed: object) -> SimpleNamespace:
    found = {
        "CompletionBoard": _core.CompletionBoard,
        "CopyEngine": _core.CopyEngine,
        "DeviceBuffer": Buffer,
        "DeviceCopier": Copier,
        "PinnedRange": lambda address, num_bytes: object(),
        "WorkerPool": _core.WorkerPool,
        "can_access_peer": lambda one, other: True,
        "chase_pointers": chase,
        "device_info": lambda device: SimpleNamespace(compute_major=9),
        "enable_peer_access": lambda one, other: None,
        "pattern_check_device": lambda device, *rest: _core.pattern_check_host(POOL, *rest),
        "pattern_check_host": _core.pattern_check_host,
        "pattern_fill_device": lambda device, *rest: _core.pattern_fill_host(POOL, *rest),
        "pattern_fill_host": _core.pattern_fill_host,
    }
    return SimpleNamespace(**(found | changed))


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> CudaNode:
    monkeypatch.setattr(cuda_node, "_core", core())
    return CudaNode({3: 0, 5: 1, 7: 2}, AREA_BYTES, num_queued=2)  # NVML's numbers are not CUDA's


@pytest.mark.parametrize("kind", [ENGINE, KERNEL, PAGED])
def test_pages_arrive_where_they_belong(node: CudaNode, kind: str) -> None:
    copies = [
        Copy(src=src, dst=7, run_by=src, kind=kind, num_pages=20, first_dst_page=first)
        for src, first in ((3, 0), (5, 20))
    ]
    for gpu in node.gpus:
        node.fill(gpu, 4)
    node.run(copies)
    assert [node.check(copy, 4).num_words for copy in copies] == [0, 0]
    crossed = Copy(src=5, dst=7, run_by=5, kind=kind, num_pages=20)
    assert node.check(crossed, 4).num_words == crossed.num_bytes // 8  # of GPU 3, not of 5


@pytest.mark.parametrize(
    ("kind", "engine", "num_sms"),
    [
        (ENGINE, _core.CopyEngine.DMA, None),
        (KERNEL, _core.CopyEngine.BULK, 0),  # all
        (PAGED, _core.CopyEngine.BULK, 8),
    ],
)
def test_a_kind_is_carried_by_what_it_says(
    node: CudaNode, kind: str, engine: object, num_sms: int | None
) -> None:
    node.run([Copy(src=3, dst=5, run_by=5, kind=kind, num_pages=4)])
    for posted in node.memory[5]._copier.posted:  # type: ignore[attr-defined]
        assert posted[0] == engine
        assert num_sms is None or posted[1] == num_sms


@pytest.mark.parametrize("sources", [(3,), (3, 5)])
def test_a_round_is_many_copies_and_its_time_that_of_one(
    node: CudaNode, monkeypatch: pytest.MonkeyPatch, sources: tuple[int, ...]
) -> None:
    copies = [Copy(src=one, dst=7, run_by=one, kind=ENGINE, num_pages=4) for one in sources]
    clock = itertools.chain([0.0] * len(sources), itertools.repeat(4.0))
    monkeypatch.setattr(cuda_node.time, "perf_counter", lambda: next(clock))
    seconds = node.run(copies)
    for one in sources:
        num_posted = len(node.memory[one]._copier.posted)  # type: ignore[attr-defined]
        assert num_posted > 1
        assert seconds == 4.0 / num_posted


def test_a_check_names_the_page_in_the_destination(node: CudaNode) -> None:
    copy = Copy(src=3, dst=5, run_by=3, kind=PAGED, num_pages=16, first_dst_page=8)
    node.fill(3, 1)
    node.run([copy])
    zeros = np.zeros(1, np.uint64)
    address = node.memory[5].destination_address + 11 * PAGE_BYTES
    ctypes.memmove(address, zeros.ctypes.data, zeros.nbytes)
    found = node.check(copy, 1)
    assert (found.num_words, found.first) == (1, "page 11")


def test_the_ring_is_read_to_its_known_end(node: CudaNode, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node.read_latency(3, 5)[0] == 900.0
    assert node.read_latency(3, 5)[1].num_words == 0
    wrong = SimpleNamespace(last_index=0, ns_per_hop=1.0)
    monkeypatch.setattr(cuda_node, "_core", core(chase_pointers=lambda *rest: wrong))
    assert node.read_latency(3, 5)[1].num_words == 1


def test_kernels_stay_away_from_what_they_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_node, "_core", core(can_access_peer=lambda one, other: False))
    node = CudaNode({0: 0, 1: 1}, AREA_BYTES, num_queued=2)
    node.run([Copy(src=0, dst=1, run_by=0, kind=ENGINE, num_pages=4)])  # through the host
    for kind in (KERNEL, PAGED):
        with pytest.raises(NotAvailable, match="GPU 1 has no peer access to GPU 0"):
            node.run([Copy(src=0, dst=1, run_by=1, kind=kind, num_pages=4)])
    with pytest.raises(NotAvailable, match="no peer access"):
        node.read_latency(0, 1)


@pytest.mark.parametrize("count", [1, 2])
def test_a_copy_that_does_not_end_is_an_error(
    node: CudaNode, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(Copier, "hangs", True)
    copies = [Copy(src=3, dst=5, run_by=3, num_pages=4), Copy(src=5, dst=3, run_by=5, num_pages=4)]
    with pytest.raises(TransferTimeout, match="did not end"):
        node.run(copies[:count])


def test_host_memory_is_checked_in_both_directions(
    node: CudaNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_device, "_core", core())
    monkeypatch.setattr(host_device, "read_pcie", lambda pci: PcieLink(generation=5))
    events: list[Event] = []
    task = Task(
        devices={3: 0},
        pcis={3: "0000:1a:00.0"},
        numa_cpus={0: (min(os.sched_getaffinity(0)),)},
        area_bytes=AREA_BYTES,
        host_bytes=AREA_BYTES,
        rounds=1,
        budget_s=60.0,
        num_threads=1,
    )
    schedule = Schedule(events.append, rounds=1, deadline_s=time.monotonic() + 60)
    measure_host_device({3: node.memory[3]}, task, schedule)
    figures = [event.figure for event in events if isinstance(event, Measured)]
    assert [(one.kind, one.src, one.dst) for one in figures[:2]] == [
        (PINNED, "numa0", "gpu3"),
        (PINNED, "gpu3", "numa0"),
    ]
    assert len(figures) == 4
    assert all(one.is_right and one.num_bytes == AREA_BYTES for one in figures)
    assert [event.gpu for event in events if isinstance(event, BusyPcie)] == [3]
