"""Copies between two processes, on CPUs of one NUMA node and from one to another."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray

from kvxfer.diagnose.expected import memcpy_good
from kvxfer.diagnose.figures import LOCAL_MEMCPY, MEMCPY, PAGED_MEMCPY, numa_name
from kvxfer.diagnose.measure.events import Skipped, Task
from kvxfer.diagnose.measure.host_device import on_cpus
from kvxfer.diagnose.measure.node import PAGE_BYTES, Wrong
from kvxfer.diagnose.measure.schedule import Key, OneRound, Schedule
from kvxfer.errors import KvxferError, VerificationError
from kvxfer.sweep.cases import raw_layout
from kvxfer.sweep.pair import Pair, PairFactory, PeerProcesses

_NUM_PLANES = 8
_WHAT = "host"
# Rounds are some milliseconds: on CPUs that others use, a quiet one comes within this time.
_EXTRA_S = 3.0


def measure_host(task: Task, schedule: Schedule) -> None:
    """Between two processes; on one node beside the same copy inside one, which it is judged by."""
    nodes = list(task.numa_cpus)
    ends = [(node, node) for node in nodes]
    ends += [end for other in nodes[1:] for end in ((nodes[0], other), (other, nodes[0]))]
    for src, dst in ends:
        if not schedule.has_time(_WHAT):
            return
        try:
            with ExitStack() as stack:
                between = stack.enter_context(_pair("shm", src, dst, task))
                rounds = _rounds_between(between, schedule, src, dst)
                if src == dst:
                    inside = stack.enter_context(_pair("loopback", src, dst, task))
                    key = LOCAL_MEMCPY, numa_name(src), numa_name(dst)
                    rounds = {key: _round_of(inside, schedule)} | rounds
                schedule.measure_in_turn(rounds, is_enough=agree, extra_s=_EXTRA_S)
        except KvxferError as error:
            schedule.emit(Skipped(_WHAT, str(error)))


def agree(best: Mapping[Key, float]) -> bool:
    """Whether the best rates of one node are near enough to each other for no finding.

    One that is not may be slow, or had no quiet round yet.
    """
    reference = max((rate for (_, src, dst), rate in best.items() if src == dst), default=0.0)
    return all(
        rate >= memcpy_good(kind) * reference
        for (kind, src, dst), rate in best.items()
        if src == dst
    )


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


def measure_pair(pair: Pair, schedule: Schedule, key: Key) -> None:
    """A figure of all blocks of a pair, in their order."""
    schedule.measure(key, _round_of(pair, schedule))


def _rounds_between(pair: Pair, schedule: Schedule, src: int, dst: int) -> dict[Key, OneRound]:
    return {
        (MEMCPY, numa_name(src), numa_name(dst)): _round_of(pair, schedule),
        (PAGED_MEMCPY, numa_name(src), numa_name(dst)): _round_of(pair, schedule, shuffled=True),
    }


def _round_of(pair: Pair, schedule: Schedule, *, shuffled: bool = False) -> OneRound:
    """All blocks of a pair, in their order or shuffled on either side."""
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

    return one_round
