"""Copies on CPUs that other programs use: noise is no finding, and a slow path still is one."""

import time
from collections.abc import Iterator
from itertools import chain, repeat

import pytest
from msgspec.structs import replace

from kvxfer.diagnose.checks import run_checks
from kvxfer.diagnose.compare import changes_since
from kvxfer.diagnose.facts import Facts
from kvxfer.diagnose.figures import ENGINE, LOCAL_MEMCPY, MEMCPY, PAGED_MEMCPY, Figure, Figures
from kvxfer.diagnose.limits import with_limits
from kvxfer.diagnose.measure.events import Begun, Event, Measured, Skipped
from kvxfer.diagnose.measure.host import agree
from kvxfer.diagnose.measure.node import Wrong
from kvxfer.diagnose.measure.schedule import Key, OneRound, Schedule
from kvxfer.diagnose.result import SCHEMA, CheckResult, DiagnoseReport, Verdict
from kvxfer.errors import CudaError, NotAvailable

KINDS = (LOCAL_MEMCPY, MEMCPY, PAGED_MEMCPY)


def key(kind: str, dst: str = "numa0") -> Key:
    return kind, "numa0", dst


def rounds_at(*rates: float) -> OneRound:
    """Rounds of so many GB/s, the last of them for ever."""
    left: Iterator[float] = chain(rates, repeat(rates[-1]))
    return lambda: (10**9, 1 / next(left), Wrong(0))


def measured(rounds: dict[Key, OneRound], extra_s: float = 60.0) -> tuple[list[Event], Figures]:
    events: list[Event] = []
    schedule = Schedule(events.append, rounds=2, deadline_s=time.monotonic() + 60)
    schedule.measure_in_turn(rounds, is_enough=agree, extra_s=extra_s)
    figures = Figures(all=[event.figure for event in events if isinstance(event, Measured)])
    return events, with_limits(Facts(), figures)


def memcpy_check(figures: Figures) -> CheckResult:
    return next(one for one in run_checks(Facts(), figures) if one.check == "memcpy")


def test_rounds_of_what_is_compared_alternate() -> None:
    events, figures = measured({key(kind): rounds_at(10.0) for kind in KINDS})
    assert [event.kind for event in events if isinstance(event, Begun)] == [*KINDS] * 3
    assert [one.rounds for one in figures.all] == [2, 2, 2]


def test_a_burst_of_other_work_is_no_finding() -> None:
    """One is slow in the rounds that are asked for: it has more, until it has had a quiet one."""
    _, figures = measured(
        {
            key(LOCAL_MEMCPY): rounds_at(17.5),
            key(MEMCPY): rounds_at(*[8.0] * 9, 15.0),
            key(PAGED_MEMCPY): rounds_at(20.0),
        }
    )
    assert [one.rounds for one in figures.all] == [9, 9, 9]
    assert memcpy_check(figures).verdict is Verdict.PASS


def test_what_stays_slow_is_a_finding() -> None:
    rounds = {key(kind): rounds_at(12.0) for kind in KINDS} | {key(MEMCPY): rounds_at(4.0)}
    _, figures = measured(rounds, extra_s=0.01)
    (finding,) = memcpy_check(figures).findings
    assert "4 GB/s at best, 33% of 12 (reference: fastest memcpy of numa0)" in finding.evidence


@pytest.mark.parametrize("fast", KINDS)
def test_no_figure_is_above_its_reference(fast: str) -> None:
    rounds = {key(kind): rounds_at(12.0) for kind in KINDS} | {key(fast): rounds_at(19.0)}
    _, figures = measured(rounds)
    known = [one.fraction_of_limit for one in figures.all if one.kind != LOCAL_MEMCPY]
    assert len(known) == 2
    assert all(fraction is not None and fraction <= 1 for fraction in known)


def test_the_far_socket_is_slower_by_nature() -> None:
    best = {key(LOCAL_MEMCPY): 12.0, key(MEMCPY, "numa1"): 3.0}
    assert agree(best)
    assert not agree(best | {key(MEMCPY): 3.0})


@pytest.mark.parametrize(
    ("error", "figures_left"), [(NotAvailable("no"), 2), (CudaError("it failed", 719), 3)]
)
def test_one_that_fails_does_not_end_the_others(error: Exception, figures_left: int) -> None:
    def fails() -> tuple[int, float, Wrong]:
        raise error

    rounds = {key(kind): rounds_at(12.0) for kind in KINDS} | {key(MEMCPY): fails}
    events, figures = measured(rounds)
    assert len(figures.all) == figures_left
    assert sum(one.is_right for one in figures.all) == 2
    assert sum(isinstance(event, Skipped) for event in events) == 3 - figures_left


def test_drift_on_cpus_is_of_the_best_round_and_by_half() -> None:
    def report(gb_per_s: float, best: float) -> DiagnoseReport:
        one = Figure(kind=MEMCPY, src="numa0", dst="numa0", gb_per_s=gb_per_s, best_gb_per_s=best)
        link = replace(one, kind=ENGINE, src="gpu0", dst="gpu1")
        figures = Figures(all=[one, link])
        return DiagnoseReport(
            schema=SCHEMA, environment={}, facts=Facts(), figures=figures, checks=[]
        )

    old = report(12.0, 18.0)
    assert [one.what for one in changes_since(old, report(5.0, 10.0)) if one.worse] == [
        f"{ENGINE} gpu0 -> gpu1"
    ]
    assert len(changes_since(old, report(5.0, 8.0))) == 2
