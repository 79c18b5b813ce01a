"""Copies between two processes, on CPUs of one NUMA node and from one to another."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvxfer.diagnose.figures import LOCAL_MEMCPY, MEMCPY, PAGED_MEMCPY, numa_name
from kvxfer.diagnose.measure.events import Skipped, Task
from kvxfer.diagnose.measure.host_device import on_cpus
from kvxfer.diagnose.measure.node import PAGE_BYTES, Wrong
from kvxfer.diagnose.measure.schedule import Schedule
from kvxfer.errors import KvxferError, VerificationError
from kvxfer.sweep.cases import raw_layout
from kvxfer.sweep.pair import Pair, PairFactory, PeerProcesses

_NUM_PLANES = 8
_WHAT = "host"


def measure_host(task: Task, schedule: Schedule) -> None:
    """Inside one process first: the limit of what two of them can do."""

    def key(kind: str, src: int, dst: int) -> tuple[str, str, str]:
        return kind, numa_name(src), numa_name(dst)

    nodes = list(task.numa_cpus)
    ends = [(node, node) for node in nodes]
    ends += [end for other in nodes[1:] for end in ((nodes[0], other), (other, nodes[0]))]
    for src, dst in ends:
        if not schedule.has_time(_WHAT):
            return
        try:
            if src == dst:
                with _pair("loopback", src, dst, task) as pair:
                    measure_pair(pair, schedule, key(LOCAL_MEMCPY, src, dst))
            with _pair("shm", src, dst, task) as pair:
                measure_pair(pair, schedule, key(MEMCPY, src, dst))
                measure_pair(pair, schedule, key(PAGED_MEMCPY, src, dst), shuffled=True)
        except KvxferError as error:
            schedule.emit(Skipped(_WHAT, str(error)))


@contextmanager
def _pair(transport: str, src: int, dst: int, task: Task) -> Iterator[Pair]:
    """A source on CPUs of one node, a destination on those of another."""
    layout = raw_layout(PAGE_BYTES, _NUM_PLANES)
    num_blocks = task.host_bytes // layout.block_bytes
    processes = PeerProcesses()
    factory = PairFactory(processes)
    try:
        if transport != "loopback":
            with on_cpus(task.numa_cpus[dst]):  # a process inherits where it may run
                processes.give_back(processes.take())
        with on_cpus(task.numa_cpus[src]):
            yield factory(
                layout=layout,
                num_blocks=num_blocks,
                transport=transport,
                memory="shared",
                num_threads=task.num_threads,
            )
    finally:
        factory.close()
        processes.close()


def measure_pair(
    pair: Pair, schedule: Schedule, key: tuple[str, str, str], *, shuffled: bool = False
) -> None:
    """A figure of all blocks of a pair, in their order or shuffled on either side."""
    random = np.random.default_rng(0)

    def order() -> NDArray[np.int64]:
        ids = np.arange(pair.num_blocks, dtype=np.int64)
        return random.permutation(ids) if shuffled else ids

    def one_round() -> tuple[int, float, Wrong]:
        src_ids, dst_ids, seed = order(), order(), schedule.next_seed()
        pair.fill(seed, src_ids)
        plan = pair.plan(src_ids, dst_ids)
        pair.wake()
        start = time.perf_counter()
        pair.move(plan)
        seconds = time.perf_counter() - start
        try:
            pair.check(seed, src_ids, dst_ids)
        except VerificationError as error:
            return plan.total_bytes, seconds, Wrong(1, str(error))
        return plan.total_bytes, seconds, Wrong(0)

    schedule.measure(key, one_round)
