"""Every ordered pair of GPUs, then many at once; the destination checks every round."""

from collections.abc import Sequence
from itertools import permutations

from kvxfer.diagnose.figures import (
    ALL_PAIRS,
    ALL_TO_ONE,
    BOTH_WAYS,
    ENGINE,
    EVERY,
    KERNEL,
    LATENCY,
    ONE_TO_ALL,
    PAGED,
    Figure,
    gpu_name,
)
from kvxfer.diagnose.measure.events import Begun, Measured, Skipped
from kvxfer.diagnose.measure.node import PAGE_BYTES, Copy, GpuNode, Wrong
from kvxfer.diagnose.measure.schedule import ROUND_S, Schedule
from kvxfer.errors import KvxferError, NotAvailable

_PROBE_PAGES = 256


def measure_pairs(node: GpuNode, schedule: Schedule) -> None:
    """All kinds of figures of all pairs."""
    for src, dst in permutations(node.gpus, 2):
        if not schedule.has_time("pairs of GPUs"):
            return
        num_pages = _measure_one_way(node, schedule, src, dst)
        if num_pages and src < dst:
            _measure_both_ways(node, schedule, src, dst, num_pages)


def measure_crowds(node: GpuNode, schedule: Schedule) -> None:
    """All GPUs to one and from one, and each to each; only where there are three or more.

    With two these are the pairs themselves.
    """
    gpus = node.gpus
    if len(gpus) < 3:
        schedule.emit(Skipped("crowds", "three GPUs make a crowd; see the pairs"))
        return
    share = node.area_bytes // PAGE_BYTES // (len(gpus) - 1)
    for one in gpus:
        others = [gpu for gpu in gpus if gpu != one]
        if not schedule.has_time("crowds"):
            return
        inward = [
            Copy(src=gpu, dst=one, run_by=gpu, num_pages=share, first_dst_page=share * place)
            for place, gpu in enumerate(others)
        ]
        _measure(node, schedule, (ALL_TO_ONE, EVERY, gpu_name(one)), inward)
        # Each destination reads, so that the copies run beside each other and not in one queue.
        outward = [Copy(src=one, dst=gpu, run_by=gpu, num_pages=share) for gpu in others]
        _measure(node, schedule, (ONE_TO_ALL, gpu_name(one), EVERY), outward)
    if schedule.has_time("crowds"):
        _measure(node, schedule, (ALL_PAIRS, EVERY, EVERY), _each_to_each(gpus, share))


def _each_to_each(gpus: Sequence[int], share: int) -> list[Copy]:
    """In turns: in each, every GPU sends to one and takes from one."""
    count = len(gpus)
    return [
        Copy(
            src=gpu,
            dst=gpus[(place + step) % count],
            run_by=gpu,
            num_pages=share,
            first_dst_page=share * (step - 1),
        )
        for step in range(1, count)
        for place, gpu in enumerate(gpus)
    ]


def _measure_one_way(node: GpuNode, schedule: Schedule, src: int, dst: int) -> int:
    """Returns the pages that a round takes; 0 where the pair failed."""
    key = gpu_name(src), gpu_name(dst)
    try:
        num_pages = _pages_of_a_round(node, schedule, src, dst)
    except KvxferError as error:
        schedule.emit(Measured(Figure(kind=ENGINE, src=key[0], dst=key[1], error=str(error))))
        return 0
    for kind in (ENGINE, KERNEL, PAGED):
        copy = Copy(src=src, dst=dst, run_by=src, kind=kind, num_pages=num_pages)
        _measure(node, schedule, (kind, *key), [copy])
    _measure_latency(node, schedule, src, dst)
    return num_pages


def _measure_both_ways(
    node: GpuNode, schedule: Schedule, src: int, dst: int, num_pages: int
) -> None:
    copies = [
        Copy(src=one, dst=other, run_by=one, num_pages=num_pages)
        for one, other in ((src, dst), (dst, src))
    ]
    _measure(node, schedule, (BOTH_WAYS, gpu_name(src), gpu_name(dst)), copies)


def _pages_of_a_round(node: GpuNode, schedule: Schedule, src: int, dst: int) -> int:
    """As many as the path copies, as often as a round does, in its time; found by a short copy."""
    schedule.emit(Begun(ENGINE, gpu_name(src), gpu_name(dst)))
    most = node.area_bytes // PAGE_BYTES
    probe = Copy(src=src, dst=dst, run_by=src, num_pages=min(_PROBE_PAGES, most))
    seconds = min(node.run([probe]) for _ in range(2))
    fitting = int(probe.num_pages * ROUND_S / (node.num_queued * seconds))
    return max(probe.num_pages, min(most, fitting))


def _measure(
    node: GpuNode, schedule: Schedule, key: tuple[str, str, str], copies: Sequence[Copy]
) -> None:
    num_bytes = sum(copy.num_bytes for copy in copies)

    def one_round() -> tuple[int, float, Wrong]:
        seed = schedule.next_seed()
        for gpu in {copy.src for copy in copies}:
            node.fill(gpu, seed)
        seconds = node.run(copies)
        found = [node.check(copy, seed) for copy in copies]
        first = next((one.first for one in found if one.num_words), "")
        return num_bytes, seconds, Wrong(sum(one.num_words for one in found), first)

    schedule.measure(key, one_round)


def _measure_latency(node: GpuNode, schedule: Schedule, src: int, dst: int) -> None:
    name = (LATENCY, gpu_name(src), gpu_name(dst))
    schedule.emit(Begun(*name))
    figure = Figure(kind=LATENCY, src=name[1], dst=name[2])
    try:
        found = [node.read_latency(src, dst) for _ in range(2)]
    except NotAvailable as error:
        schedule.emit(Skipped(figure.where, str(error)))
        return
    except KvxferError as error:
        schedule.emit(Measured(Figure(kind=LATENCY, src=name[1], dst=name[2], error=str(error))))
        return
    wrong = max((one for _, one in found), key=lambda one: one.num_words)
    schedule.emit(
        Measured(
            Figure(
                kind=LATENCY,
                src=name[1],
                dst=name[2],
                latency_ns=min(nanoseconds for nanoseconds, _ in found),
                rounds=len(found),
                num_wrong=wrong.num_words,
                first_wrong=wrong.first,
            )
        )
    )
