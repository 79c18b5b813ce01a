"""What a validation does to a profile, and how its table says so."""

import msgspec
import pytest
from rich.console import Console
from tuning_profiles import profile_of

from kvxfer.report.tune_table import print_profile, summary
from kvxfer.sweep.tune import fit
from kvxfer.sweep.tune.trials import AGAIN, DEFAULT, Point, Trials
from kvxfer.tuning import Check, Rule, Section, Slots

MIB = 1 << 20
POINTS = [
    Point(op, run, total)
    for op in ("put", "get")
    for run in (4096, 16384, 65536)
    for total in (MIB, 8 * MIB)
]


def check_of(verdict: str, point: Point = POINTS[0], **fields: object) -> Check:
    base = {
        "transport": "shm",
        "memory": "shared",
        "op": point.op,
        "run_bytes": point.run_bytes,
        "total_bytes": point.total_bytes,
        "default_us": 100.0,
        "profile_us": 100.0,
        "gain": 0.0,
        "noise": 0.03,
        "verdict": verdict,
    }
    return msgspec.convert(base | fields, Check)


def test_a_rule_that_is_slower_is_taken_back() -> None:
    cells = fit.cells(POINTS)
    rules = tuple(msgspec.structs.replace(rule, engine="memcpy") for rule in cells.values())
    section = Section(transport="shm", memory="shared", num_threads=1, rules=rules)
    verdicts = ["slower" if point == POINTS[1] else "gain" for point in POINTS]
    checks = [check_of(word, point) for word, point in zip(verdicts, POINTS, strict=True)]
    kept, marked = fit.take_back(section, checks)
    assert [check.verdict for check in marked] == ["gain", "taken back", *["gain"] * 10]
    assert kept.rules == (rules[0], *rules[2:])
    assert kept.num_threads == 1


def test_a_rule_that_gains_nothing_is_taken_back() -> None:
    cells = fit.cells(POINTS[:3])
    rules = tuple(msgspec.structs.replace(rule, engine="streaming") for rule in cells.values())
    section = Section(transport="shm", memory="shared", rules=rules)
    of_ranks = POINTS[2]._replace(src_tp=2)  # one point of a rule that gains is enough
    checks = [
        check_of("same", POINTS[0], gain=0.08),
        check_of("gain", POINTS[1]),
        check_of("same", POINTS[2]),
        check_of("gain", of_ranks, src_tp=2),
        check_of("same", POINTS[3]),
    ]
    kept, marked = fit.take_back(section, checks)
    assert kept.rules == rules[1:]
    assert [check.verdict for check in marked] == ["taken back", "gain", "same", "gain", "same"]
    text = summary(profile_of(kept, checks=tuple(marked)))
    assert "2 faster than noise, 2 within it, 0 slower, 1 taken back" in text


def test_threads_that_gain_nowhere_are_taken_back() -> None:
    section = Section(transport="shm", memory="shared", num_threads=1)
    kept, marked = fit.take_back(section, [check_of("same"), check_of("same")])
    assert kept.is_empty
    assert {check.verdict for check in marked} == {"taken back"}


def test_a_gain_is_that_of_the_times_beside_it() -> None:
    # The machine drifts: medians of each column would say that the profile is slower.
    trials = Trials()
    trials._times_us.update(
        {
            (DEFAULT, POINTS[0]): [80.0, 200.0, 300.0],
            (AGAIN, POINTS[0]): [80.0, 100.0, 120.0],
            ("x", POINTS[0]): [110.0, 120.0, 130.0],
        }
    )
    (check,) = fit.checks_of("shm", "shared", trials, "x")
    assert check.profile_us == pytest.approx(120.0)
    assert check.gain == pytest.approx(1.0 - check.profile_us / check.default_us)


def test_a_verdict_that_its_figures_do_not_show_says_why() -> None:
    checks = (
        check_of("same", gain=0.08),
        check_of("same", gain=0.02),
        check_of("gain", gain=0.08),
    )
    console = Console(record=True, width=160)
    print_profile(profile_of(checks=checks), console)
    text = console.export_text()
    assert text.count("same") - text.count("same: not in every repeat") == 1
    assert text.count("same: not in every repeat") == 1


def test_threads_and_slots_that_are_slower_are_taken_back() -> None:
    slots = (Slots(place="host", num_slots=4, slot_bytes=MIB),)
    section = Section(transport="shm", memory="shared", num_threads=1, slots=slots)
    rules = (Rule(op="get", engine="memcpy"),)  # measured on top of them
    section = msgspec.structs.replace(section, rules=rules)
    kept, marked = fit.take_back(section, [check_of("gain"), check_of("slower")])
    assert kept.is_empty
    assert [check.verdict for check in marked] == ["taken back", "taken back"]


def test_what_has_the_defaults_stays_slower_to_be_seen() -> None:
    section = Section(transport="shm", memory="shared")
    assert fit.take_back(section, [check_of("slower")]) == (section, [check_of("slower")])
    text = summary(profile_of(checks=(check_of("slower"),)))
    assert "0 within it, 1 slower" in text
    assert "it shows how far noise goes" in text
