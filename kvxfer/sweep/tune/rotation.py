"""Measures points in several ways by turns, with the sweep's own runner."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from kvxfer.closing import Closing
from kvxfer.errors import VerificationError
from kvxfer.sweep.case_run import CaseRun
from kvxfer.sweep.cases import SweepCase, expand_cases
from kvxfer.sweep.ranks import RankSweepRun
from kvxfer.sweep.ranks.cases import RankCase
from kvxfer.sweep.result import SweepResult
from kvxfer.sweep.runner import SweepRun
from kvxfer.sweep.tune.plan import Area, Sizes, rank_options, sweep_options
from kvxfer.sweep.tune.trials import Trials, again_of
from kvxfer.tuning import Profile

_Case: TypeAlias = tuple[CaseRun[Any], SweepCase | RankCase]
_Way: TypeAlias = Callable[[int], SweepResult | None]
"""Measures the point of that number."""


class Rotation(Closing):
    """One area under several profiles. Its processes are started once. A context manager."""

    def __init__(self, area: Area, sizes: Sizes, *, with_ranks: bool) -> None:
        """Start the processes.

        Args:
            area: what is measured.
            sizes: its points.
            with_ranks: measure pairs of tensor-parallel sizes too.

        Raises:
            NotAvailable: the transport does not work here.
        """
        self._sizes = sizes
        with ExitStack() as stack:
            self._cases: list[_Case] = _pair_cases(area, sizes, stack)
            if sizes.tp and with_ranks:
                ranks = stack.enter_context(RankSweepRun(rank_options(area, sizes)))
                self._cases += [(ranks, case) for case in ranks.cases]
            self._stack = stack.pop_all()

    def num_measurements(self, num_profiles: int) -> int:
        """How often :meth:`measure` calls ``on_measured``."""
        return num_profiles * len(self._cases) * self._sizes.repeats

    def measure(self, profiles: Mapping[str, Profile], on_measured: Callable[[], None]) -> Trials:
        """Time all points under each profile.

        Raises:
            VerificationError: wrong bytes were delivered.
            PeerLost: a process ended.
        """
        ways = {
            name: partial(_run, self._cases, profile=profile) for name, profile in profiles.items()
        }
        trials = _take_turns(self._sizes.repeats, len(self._cases), ways, on_measured)
        _require_right_bytes(run for run, _ in self._cases)
        return trials

    def reasons(self) -> list[str]:
        """Why points were not measured, each reason once."""
        rows = [row for run, _ in self._cases for row in run.report.skipped]
        return list(dict.fromkeys(row.reason for row in rows))

    def close(self) -> None:
        """End the processes; may be called more than once."""
        self._stack.close()


def compare(
    areas: Sequence[Area], sizes: Sizes, profile: Profile, on_measured: Callable[[], None]
) -> Trials:
    """Time the same points over several transports, each twice: by its name, and `again_of` it.

    Raises:
        NotAvailable: one does not work here.
        VerificationError: wrong bytes were delivered.
        PeerLost: a process ended.
    """
    with ExitStack() as stack:
        cases = {area.transport: _pair_cases(area, sizes, stack) for area in areas}
        ways: dict[str, _Way] = {}
        for again in (False, True):
            for name, own in cases.items():
                ways[again_of(name) if again else name] = partial(_run, own, profile=profile)
        num_cases = len(next(iter(cases.values())))
        trials = _take_turns(sizes.repeats, num_cases, ways, on_measured)
        _require_right_bytes(run for own in cases.values() for run, _ in own)
        return trials


def _pair_cases(area: Area, sizes: Sizes, stack: ExitStack) -> list[_Case]:
    options = sweep_options(area, sizes)
    run = stack.enter_context(SweepRun(options))
    return [
        (run, case)
        for total_bytes in sizes.total_bytes
        for case in expand_cases(
            replace(options, total_bytes=total_bytes), transport=area.transport
        )
    ]


def _run(cases: Sequence[_Case], number: int, *, profile: Profile) -> SweepResult | None:
    run, case = cases[number]
    result: SweepResult | None = run.run_case(replace(case, tuning=profile))
    return result


def _take_turns(
    num_repeats: int, num_cases: int, ways: Mapping[str, _Way], on_measured: Callable[[], None]
) -> Trials:
    """Who comes first changes from repeat to repeat."""
    trials = Trials()
    names = list(ways)
    for repeat in range(num_repeats):
        first = repeat % len(names)
        for number in range(num_cases):
            for name in (*names[first:], *names[:first]):
                result = ways[name](number)
                if result is not None:
                    trials.add(name, result)
                on_measured()
    return trials


def _require_right_bytes(runs: Iterable[CaseRun[Any]]) -> None:
    for run in runs:
        for row in run.report.skipped:
            if row.failed:
                raise VerificationError(f"{row.case}: {row.reason}; nothing was written")
