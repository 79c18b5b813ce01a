"""A whole tuning: area by area, step by step, then the validation and the order."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TypeVar

import msgspec

from kvxfer import _core
from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.memory import MemoryKind
from kvxfer.sweep.paths import choose_devices
from kvxfer.sweep.tune import fit
from kvxfer.sweep.tune.plan import (
    Area,
    Candidate,
    Step,
    areas_of,
    order_sizes,
    sizes_of,
    steps_of,
    tunable,
)
from kvxfer.sweep.tune.rotation import Rotation, compare
from kvxfer.sweep.tune.trials import AGAIN, DEFAULT, Point, Trials
from kvxfer.transport import TRANSPORTS, candidates, tuned
from kvxfer.transport.network_libraries import library_versions
from kvxfer.tuning import SCHEMA, Check, Fingerprint, Memory, Profile, Rule, Section

_TUNED = "profile"
_StructT = TypeVar("_StructT", Section, Rule)
OnProgress = Callable[[str, int, int], None]
"""Takes what is measured, how many measurements of it are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What is asked for.

    Attributes:
        transports: names; empty = all that work here.
        quick: few points and candidates, three repeats: under a minute on two cores.
        command: what is written into the profile as its origin.
    """

    transports: tuple[str, ...] = ()
    quick: bool = False
    command: str = ""


class TuneRun:
    """A tuning of this machine.

    Attributes:
        areas: what is tuned, in order.
        notes: what could not be measured, and why.
    """

    def __init__(self, options: TuneOptions) -> None:
        """Find out what there is.

        Raises:
            InvalidUsage: a transport that cannot be tuned.
            NotAvailable: one that was asked for does not work here, or none does.
        """
        self._options = options
        self.areas = areas_of(_transports(options.transports), has_gpus=_core.device_count() > 0)
        self.notes: list[str] = []
        self._fingerprint = fingerprint_here()

    def run(self, on_progress: OnProgress = lambda *_: None) -> Profile:
        """Measure everything.

        Raises:
            VerificationError: wrong bytes were delivered.
            PeerLost: a process of the measurement ended.
        """
        # Not by the profile that this one replaces.
        with tuned.using(self._empty()):
            return self._run(on_progress)

    def _run(self, on_progress: OnProgress) -> Profile:
        sections: list[Section] = []
        checks: list[Check] = []
        for area in self.areas:
            run = _AreaRun(area, self._empty(), self._options.quick, on_progress)
            section, own = run.run()
            sections.append(section)
            checks += own
            where = f"{area.transport}, {area.memory} memory"
            self.notes += [f"not measured: {where}: {reason}" for reason in run.reasons]
        profile = msgspec.structs.replace(
            self._empty(),
            sections=tuple(section for section in sections if not section.is_empty),
            checks=tuple(checks),
        )
        orders = {kind.value: self._order(kind, profile, on_progress) for kind in _COMPARED}
        order = {kind: names for kind, names in orders.items() if names}
        return msgspec.structs.replace(profile, order=order)

    def _order(
        self, kind: MemoryKind, profile: Profile, on_progress: OnProgress
    ) -> tuple[str, ...]:
        """Of the transports as the profile has them run; empty for the default order."""
        memory = _COMPARED[kind]
        names = [name for name in candidates(kind) if Area(name, memory) in self.areas]
        if len(names) < 2:
            return ()
        sizes = order_sizes(memory, quick=self._options.quick)
        num_cases = len(sizes.page_bytes) * len(sizes.total_bytes) * len(sizes.ops)
        progress = _Progress(
            f"order of transports, {kind.value} memory",
            2 * len(names) * num_cases * sizes.repeats,
            on_progress,
        )
        areas = [Area(name, memory) for name in names]
        return fit.fit_order(names, compare(areas, sizes, profile, progress.advance))

    def _empty(self) -> Profile:
        created = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        return Profile(
            schema=SCHEMA,
            created=created,
            command=self._options.command,
            fingerprint=self._fingerprint,
        )


# The kind of memory in which transports are compared with each other.
_COMPARED: Mapping[MemoryKind, Memory] = {MemoryKind.HOST: "private", MemoryKind.DEVICE: "device"}


class _AreaRun:
    """One section, from nothing.

    Attributes:
        reasons: why points were not measured.
    """

    def __init__(self, area: Area, empty: Profile, quick: bool, on_progress: OnProgress) -> None:
        self._area, self._empty, self._quick = area, empty, quick
        self._on_progress = on_progress
        self._cells: dict[Point, Rule] = {}
        self.reasons: list[str] = []

    def run(self) -> tuple[Section, list[Check]]:
        area = self._area
        section = Section(transport=area.transport, memory=area.memory)
        steps = steps_of(area, quick=self._quick, max_sms=_num_sms(area) if area.is_of_gpus else 0)
        with_ranks = any(step.by_point for step in steps)
        sizes = sizes_of(area, quick=self._quick)
        with Rotation(area, sizes, with_ranks=with_ranks) as rotation:
            for step in steps:
                section = self._take(step, section, rotation)
            trials = self._measure(rotation, "validation", None, {_TUNED: section})
            checks = fit.checks_of(area.transport, area.memory, trials, _TUNED)
            self.reasons = rotation.reasons()
        return fit.take_back(section, checks)

    def _take(self, step: Step, base: Section, rotation: Rotation) -> Section:
        """The section with what a step has found to be faster."""
        if not step.by_point:
            made = {one.name: _with(base, one) for one in step.candidates}
            trials = self._measure(rotation, step.name, base, made)
            winner = fit.best_of_all(trials, made)
            return base if winner is None else made[winner]
        names = {one.name: one for one in step.candidates}
        ruled = {name: self._ruled(base, one) for name, one in names.items()}
        trials = self._measure(rotation, step.name, base, ruled)
        self._cells = self._cells or fit.cells(trials.points)
        best = fit.best_by_point(trials, list(names), min_gain=step.min_gain)
        for point, name in best.items():
            self._cells[point] = _with(self._cells[point], names[name])
        return msgspec.structs.replace(base, rules=fit.merged_rules(self._cells))

    def _ruled(self, base: Section, candidate: Candidate) -> Section:
        """A section that has the candidate at every size, beside what is known of each."""
        rules = [_with(rule, candidate) for rule in self._cells.values()]
        rules += [_with(Rule(op=op), candidate) for op in ("put", "get")]
        return msgspec.structs.replace(base, rules=tuple(rules))

    def _measure(
        self,
        rotation: Rotation,
        what: str,
        default: Section | None,
        others: Mapping[str, Section],
    ) -> Trials:
        sections = {DEFAULT: default, **others, AGAIN: default}
        progress = _Progress(
            f"{self._area.transport}, {self._area.memory} memory: {what}",
            rotation.num_measurements(len(sections)),
            self._on_progress,
        )
        profiles = {
            name: msgspec.structs.replace(
                self._empty, sections=() if section is None else (section,)
            )
            for name, section in sections.items()
        }
        return rotation.measure(profiles, progress.advance)


class _Progress:
    """How far a step is."""

    def __init__(self, label: str, total: int, tell: OnProgress) -> None:
        self._label, self._total, self._tell = label, total, tell
        self._done = 0

    def advance(self) -> None:
        self._done += 1
        self._tell(self._label, self._done, self._total)


def _with(base: _StructT, candidate: Candidate) -> _StructT:
    return msgspec.structs.replace(base, **candidate.fields)


def _transports(asked: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in asked if name not in tunable()]
    if unknown:
        raise InvalidUsage(f"transport {', '.join(unknown)}; use {', '.join(tunable())}")
    found = {name: TRANSPORTS[name].probe() for name in asked or tunable()}
    missing = [f"{name}: {one.reason}" for name, one in found.items() if not one.available]
    if missing and (asked or len(missing) == len(found)):
        raise NotAvailable("; ".join(missing))
    return tuple(name for name, one in found.items() if one.available)


def _num_sms(area: Area) -> int:
    devices = choose_devices(None, area.transport)
    return min(_core.device_info(device).num_sms for device in devices)


def fingerprint_here() -> Fingerprint:
    """This machine with its libraries, as a profile has it."""
    return tuned.host_fingerprint(library_versions())
