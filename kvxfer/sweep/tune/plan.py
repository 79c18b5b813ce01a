"""What is measured for a profile: sections, their points, and the candidates of each step."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvxfer.sweep.cases import RankOptions, SweepOptions
from kvxfer.transport import TRANSPORTS
from kvxfer.transport.host_copy import default_num_threads
from kvxfer.tuning import ENGINES_OF, Memory, Place, Slots

_NETWORKS = ("ucx", "nixl")
_MAX_THREADS = 16
# An SM that copies does not compute: 32 slow a matrix product by 18 % (ARCHITECTURE.md), and more
# must be worth it.
_SMS = (8, 16, 32)
_SM_GAIN = 0.10
_MIB = 1 << 20
_SLOTS: dict[str, tuple[tuple[int, int], ...]] = {
    "host": ((4, _MIB // 2), (4, _MIB), (8, _MIB), (2, 4 * _MIB), (4, 4 * _MIB)),
    "pinned": ((4, 4 * _MIB), (8, 4 * _MIB), (8, 8 * _MIB), (4, 16 * _MIB)),
    "device": ((4, 8 * _MIB), (8, 8 * _MIB), (4, 16 * _MIB), (8, 16 * _MIB)),
}
_QUICK_SLOTS = 2  # of them


class Area(NamedTuple):
    """A section: one transport, one kind of memory."""

    transport: str
    memory: Memory

    @property
    def is_of_gpus(self) -> bool:
        """Whether GPUs copy."""
        return self.memory == "device"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The points of a section, and how often each is measured.

    Attributes:
        page_bytes: runs.
        total_bytes: of a request.
        ops: operations.
        tp: pairs of tensor-parallel sizes besides, of ``rank_tokens`` tokens of a small model.
        iters: rounds of a repeat.
        repeats: of default and candidates in turns.
    """

    page_bytes: tuple[int, ...]
    total_bytes: tuple[int, ...]
    ops: tuple[str, ...]
    tp: tuple[tuple[int, int], ...]
    rank_tokens: tuple[int, ...]
    iters: int
    repeats: int


_HOST = Sizes(
    (4 << 10, 16 << 10, 64 << 10, 256 << 10),
    (_MIB, 8 * _MIB, 32 * _MIB),
    ("put", "get"),
    ((2, 1),),
    (64,),
    iters=8,
    repeats=5,
)
_QUICK_HOST = replace(
    _HOST,
    page_bytes=(16 << 10, 64 << 10),
    total_bytes=(_MIB, 4 * _MIB),
    ops=("put",),
    tp=(),
    iters=3,
    repeats=3,
)
_QUICK_NETWORK = replace(_QUICK_HOST, page_bytes=(16 << 10,), total_bytes=(4 * _MIB,))
_DEVICE = replace(
    _HOST,
    page_bytes=(2 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10),
    total_bytes=(8 * _MIB, 64 * _MIB, 1024 * _MIB),
    rank_tokens=(1024,),
)
_QUICK_DEVICE = replace(_QUICK_HOST, total_bytes=(8 * _MIB, 64 * _MIB))


def sizes_of(area: Area, *, quick: bool) -> Sizes:
    """The points of an area."""
    if area.is_of_gpus:
        return _QUICK_DEVICE if quick else _DEVICE
    if not quick:
        return _HOST
    return _QUICK_NETWORK if area.transport in _NETWORKS else _QUICK_HOST


def order_sizes(memory: Memory, *, quick: bool) -> Sizes:
    """The points at which transports are compared with each other."""
    sizes = _QUICK_DEVICE if memory == "device" else _QUICK_NETWORK
    return replace(sizes, repeats=(_QUICK_HOST if quick else _HOST).repeats)


def areas_of(names: Iterable[str], *, has_gpus: bool) -> list[Area]:
    """The sections that a profile can have of these transports."""
    areas = []
    for name in names:
        if name == "shm":
            areas += [Area(name, "shared"), Area(name, "private")]
        elif name == "nvlink":
            areas.append(Area(name, "device"))
        elif name in _NETWORKS:
            areas.append(Area(name, "private"))
            if has_gpus:
                areas.append(Area(name, "device"))
    return areas


def tunable() -> tuple[str, ...]:
    """Transports that a profile can have sections of, in their default order."""
    return tuple(name for name in TRANSPORTS if name in ENGINES_OF)


def sweep_options(area: Area, sizes: Sizes) -> SweepOptions:
    """A sweep of pairs; its cases are of one total, see :func:`kvxfer.sweep.expand_cases`."""
    return SweepOptions(
        transport=area.transport,
        page_bytes=sizes.page_bytes,
        total_bytes=sizes.total_bytes[0],
        memory=(area.memory,),
        ops=sizes.ops,
        iters=sizes.iters,
        warmup=1,
    )


def rank_options(area: Area, sizes: Sizes) -> SweepOptions:
    """A sweep of pairs of tensor-parallel sizes."""
    return replace(
        sweep_options(area, sizes),
        page_bytes=(),
        total_bytes=None,
        tokens=sizes.rank_tokens,
        ranks=RankOptions(tp=sizes.tp),
    )


class Candidate(NamedTuple):
    """One change.

    Attributes:
        name: for people.
        fields: what it sets, of a section in a step for connections, of a rule in one by point.
    """

    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """Candidates of one choice.

    Attributes:
        name: for people.
        candidates: tried against what the steps before have found.
        by_point: whether each point has its own winner.
        min_gain: what a candidate must gain, the first of them being those that cost least.
    """

    name: str
    candidates: tuple[Candidate, ...]
    by_point: bool
    min_gain: float = 0.0


def steps_of(area: Area, *, quick: bool, max_sms: int = 0) -> list[Step]:
    """The choices of an area, in the order in which they are made; those without one are left out.

    Args:
        area: the section.
        quick: fewer candidates, and threads of networks as they are.
        max_sms: SMs of the GPU; 0 for host memory.
    """
    steps = []
    if not area.is_of_gpus and not (quick and area.transport in _NETWORKS):
        steps.append(Step("threads", _threads(), by_point=False))
    if area.transport in _NETWORKS:
        steps.append(Step("slots", _slots(area, quick), by_point=False))
    if area.is_of_gpus and area.transport != "ucx":  # there the network limits, not the SMs
        counts = [count for count in _SMS if count <= max_sms]
        steps.append(Step("SMs", tuple(map(_sms, counts)), by_point=True, min_gain=_SM_GAIN))
    if area != ("shm", "private"):  # where the kernel copies
        engines = ENGINES_OF[area.transport][1:]
        steps.append(Step("engine", tuple(map(_engine, engines)), by_point=True))
    return [step for step in steps if step.candidates]


def _threads() -> tuple[Candidate, ...]:
    most = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    counts = sorted({1, 2, 4, 8, most} - {default_num_threads()})
    return tuple(
        Candidate(f"{count} threads", {"num_threads": count}) for count in counts if count <= most
    )


def _slots(area: Area, quick: bool) -> tuple[Candidate, ...]:
    places: Sequence[Place] = ("host",)
    if area.is_of_gpus:
        places = ("pinned",) if area.transport == "ucx" else ("pinned", "device")
    candidates = []
    # Of places together, of which a connection has one: which one, the machine says.
    for shapes in zip(*(_SLOTS[place] for place in places), strict=True):
        slots = tuple(
            Slots(place=place, num_slots=count, slot_bytes=num_bytes)
            for place, (count, num_bytes) in zip(places, shapes, strict=True)
        )
        name = " or ".join(f"{one.num_slots} x {one.slot_bytes >> 10} KiB" for one in slots)
        candidates.append(Candidate(name, {"slots": slots}))
    return tuple(candidates[1 : 1 + _QUICK_SLOTS] if quick else candidates)


def _sms(count: int) -> Candidate:
    return Candidate(f"{count} SMs", {"num_sms": count})


def _engine(name: str) -> Candidate:
    return Candidate(name, {"engine": name})
