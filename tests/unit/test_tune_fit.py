"""From trials to a profile: a known best is found, and noise changes nothing."""

from itertools import combinations, product
from pathlib import Path

import msgspec
import pytest
from tuning_profiles import profile_of
from tuning_trials import Speed, SyntheticRotation, trials_of

from kvxfer.report.tune_table import summary
from kvxfer.sweep.result import SweepReport
from kvxfer.sweep.tune import fit
from kvxfer.sweep.tune import run as run_module
from kvxfer.sweep.tune.plan import Area
from kvxfer.sweep.tune.run import TuneOptions, TuneRun
from kvxfer.sweep.tune.trials import AGAIN, DEFAULT, Point, Trials, again_of
from kvxfer.sweep.tune.verdict import MIN_GAIN, Repeats, judge
from kvxfer.transport import tuned
from kvxfer.tuning import Profile, Section, Slots

MIB = 1 << 20
RECORDS = Path(__file__).parents[2] / "bench" / "results"
POINTS = [
    Point(op, run, total)
    for op in ("put", "get")
    for run in (4096, 16384, 65536)
    for total in (MIB, 8 * MIB)
]
SHARED = Area("shm", "shared")
NVLINK = Area("nvlink", "device")


def flat(_: Point) -> float:
    return 100.0


# The rule.


@pytest.mark.parametrize(
    ("default", "again", "candidate", "word"),
    [
        ([100] * 3, [100] * 3, [90] * 3, "gain"),
        ([100] * 3, [100] * 3, [110] * 3, "slower"),
        ([100] * 3, [100] * 3, [98] * 3, "same"),  # below 3 %
        ([100] * 3, [100] * 3, [80, 80, 101], "same"),  # one repeat says otherwise
        ([100, 100, 100], [120, 80, 120], [90] * 3, "same"),  # the default differs by as much
        ([100, 300, 200], [101, 303, 202], [80, 240, 160], "gain"),  # the machine drifts
    ],
)
def test_the_rule(
    default: list[float], again: list[float], candidate: list[float], word: str
) -> None:
    verdict = judge(Repeats(default, again, candidate))
    assert verdict.word == word
    assert verdict.noise >= MIN_GAIN


def test_noise_alone_gains_nothing() -> None:
    words = [
        fit.checks_of(
            "shm",
            "shared",
            trials_of({DEFAULT: flat, "x": flat}, POINTS, noise=0.1, seed=seed),
            "x",
        )
        for seed in range(50)
    ]
    found = [check.verdict for checks in words for check in checks]
    assert len(found) == 600
    # Each side by chance in well under one of a hundred.
    assert found.count("gain") <= 9
    assert found.count("slower") <= 9


# What is chosen.


def test_the_best_for_all_points_loses_at_none() -> None:
    def faster(point: Point) -> float:
        return 80.0

    def fastest_but_at_one(point: Point) -> float:
        return 120.0 if point == POINTS[3] else 50.0

    trials = trials_of(
        {DEFAULT: flat, "a": faster, "b": fastest_but_at_one, "c": flat}, POINTS, noise=0.01
    )
    assert fit.best_of_all(trials, ["a", "b", "c"]) == "a"
    assert fit.best_of_all(trials, ["b", "c"]) is None


def test_a_candidate_that_does_not_work_everywhere_is_not_taken() -> None:
    trials = trials_of({DEFAULT: flat}, POINTS)
    partly = trials_of({DEFAULT: flat, "a": lambda _: 50.0}, POINTS[:-1])
    for point in POINTS[:-1]:
        repeats = partly.repeats("a", point)
        assert repeats is not None
    assert fit.best_of_all(trials, ["a"]) is None
    assert fit.best_by_point(trials, ["a"]) == {}


def test_each_point_has_its_own_best() -> None:
    trials = trials_of(
        {
            DEFAULT: flat,
            "short": lambda point: 70.0 if point.run_bytes == 4096 else 130.0,
            "put": lambda point: 80.0 if point.op == "put" else 100.0,
        },
        POINTS,
        noise=0.01,
    )
    best = fit.best_by_point(trials, ["short", "put"])
    assert {point for point, name in best.items() if name == "short"} == {
        point for point in POINTS if point.run_bytes == 4096
    }
    assert {point for point, name in best.items() if name == "put"} == {
        point for point in POINTS if point.op == "put" and point.run_bytes != 4096
    }


def test_a_candidate_that_costs_more_must_be_worth_it() -> None:
    times_us = {DEFAULT: 100.0, "16": 95.0, "32": 80.0, "64": 78.0, "132": 60.0}
    trials = trials_of({name: lambda _, t=t: t for name, t in times_us.items()}, POINTS[:1])

    def best(*names: str) -> list[str]:
        return list(fit.best_by_point(trials, names, min_gain=0.1).values())

    assert best("16") == []
    assert best("16", "32", "64") == ["32"]
    assert best("16", "32", "64", "132") == ["132"]


def test_ranks_and_pairs_of_one_size_must_agree() -> None:
    of_ranks = Point("put", 4096, MIB, 2, 1)
    trials = trials_of(
        {DEFAULT: flat, "a": lambda point: 130.0 if point == of_ranks else 70.0},
        [*POINTS, of_ranks],
    )
    assert POINTS[0].sizes == of_ranks.sizes
    assert POINTS[0] not in fit.best_by_point(trials, ["a"])


def test_boxes_hold_their_point_and_no_other() -> None:
    cells = fit.cells(POINTS)
    assert set(cells) == set(POINTS)
    for point, other in product(POINTS, POINTS):
        assert cells[point].fits(other.op, *other.sizes) == (point == other)
    for one, another in combinations(cells.values(), 2):
        apart = (
            one.op != another.op
            or one.max_run_bytes <= another.min_run_bytes
            or another.max_run_bytes <= one.min_run_bytes
            or one.max_total_bytes <= another.min_total_bytes
            or another.max_total_bytes <= one.min_total_bytes
        )
        assert apart, (one, another)


def test_boxes_end_a_factor_of_two_beyond_the_points() -> None:
    (rule,) = fit.cells([Point("put", 4096, MIB)]).values()
    for sizes, holds in (
        ((2048, MIB // 2), True),
        ((8192, 2 * MIB), True),
        ((2047, MIB), False),
        ((8193, MIB), False),
        ((4096, MIB // 2 - 1), False),
        ((4096, 2 * MIB + 1), False),
    ):
        assert rule.fits("put", *sizes) is holds, sizes


# The order.


def compared(noise: float = 0.0, **times_us: float) -> Trials:
    ways = {}
    for name, time_us in times_us.items():
        ways[name] = ways[again_of(name)] = lambda _, t=time_us: t
    return trials_of(ways, POINTS, noise=noise)


def test_transports_are_ordered_by_speed_beyond_noise() -> None:
    default = ("shm", "nixl", "ucx")
    assert fit.fit_order(default, compared(shm=100, nixl=50, ucx=40)) == ("ucx", "nixl", "shm")
    assert fit.fit_order(default, compared(shm=100, nixl=50, ucx=70)) == ("nixl", "ucx", "shm")
    assert fit.fit_order(default, compared(shm=100, nixl=50, ucx=49)) == ("nixl", "ucx", "shm")
    assert fit.fit_order(default, compared(shm=100, nixl=98, ucx=110)) == ()
    assert fit.fit_order(default, compared(shm=100, nixl=200, ucx=300, noise=0.1)) == ()


def test_a_transport_without_figures_passes_none() -> None:
    assert fit.fit_order(("shm", "nixl"), compared(shm=100)) == ()


# Whole tunings of machines that are not there.


def tuned_on(
    monkeypatch: pytest.MonkeyPatch, area: Area, speed: Speed, *, noise: float = 0.0
) -> Profile:
    monkeypatch.setattr(run_module, "Rotation", SyntheticRotation(speed, POINTS, noise))
    monkeypatch.setattr(run_module, "_num_sms", lambda area: 132)
    run = TuneRun(TuneOptions(("shm",)))
    run.areas = [area]
    return run.run()


def test_a_gpus_budget_and_engine_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def speed(section: Section, point: Point) -> float:
        rule = section.rule_for(point.op, *point.sizes)
        if point.run_bytes == 65536:
            return 60.0 if rule.engine == "dma" else 100.0
        if rule.engine not in ("auto", "bulk"):
            return 300.0
        return 100.0 if point.run_bytes == 16384 else 1000.0 / (rule.num_sms or 8)

    profile = tuned_on(monkeypatch, NVLINK, speed, noise=0.005)
    (section,) = profile.sections
    for point in POINTS:
        rule = section.rule_for(point.op, *point.sizes)
        best = {4096: ("auto", 32), 16384: ("auto", 0), 65536: ("dma", 0)}[point.run_bytes]
        assert (rule.engine, rule.num_sms) == best, point
    verdicts = {check.run_bytes: check.verdict for check in profile.checks}
    assert verdicts == {4096: "gain", 16384: "same", 65536: "gain"}
    assert "8 faster than noise, 4 within it, 0 slower" in summary(profile)


def test_threads_and_engine_of_a_host_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))

    def speed(section: Section, point: Point) -> float:
        rule = section.rule_for(point.op, *point.sizes)
        by_threads = {4: 60.0, None: 100.0}.get(section.num_threads, 90.0)
        return by_threads * (0.5 if rule.engine == "streaming" and point.op == "get" else 1.0)

    profile = tuned_on(monkeypatch, SHARED, speed, noise=0.005)
    (section,) = profile.sections
    assert section.num_threads == 4
    assert {rule.op for rule in section.rules} == {"get"}
    assert {check.verdict for check in profile.checks} == {"gain"}
    assert profile.checks[-1].gain == pytest.approx(0.7, abs=0.02)


def test_slots_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def speed(section: Section, point: Point) -> float:
        slots = section.slots_in("host")
        return 50.0 if slots is not None and slots.num_slots == 8 else 100.0

    (section,) = tuned_on(monkeypatch, Area("nixl", "private"), speed).sections
    assert section.slots == (Slots(place="host", num_slots=8, slot_bytes=MIB),)


def test_the_order_is_found_whatever_the_profile_was_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare = lambda *_: compared(shm=100, nixl=50, ucx=70)  # noqa: E731
    monkeypatch.setattr(run_module, "compare", compare)
    monkeypatch.setattr(run_module, "Rotation", SyntheticRotation(lambda *_: 100.0, POINTS))
    run = TuneRun(TuneOptions(("shm",)))
    run.areas = [Area(name, "private") for name in ("shm", "nixl", "ucx")]
    for before in (("nixl", "ucx", "shm"), ("ucx", "shm", "nixl")):
        with tuned.using(profile_of(order={"host": before})):
            assert run.run().order == {"host": ("nixl", "ucx", "shm")}


def test_what_cannot_be_measured_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "Rotation", SyntheticRotation(lambda *_: 100.0, []))
    run = TuneRun(TuneOptions(("shm",)))
    run.areas = [SHARED]
    profile = run.run()
    assert profile.is_empty
    assert profile.checks == ()
    assert run.notes == ["not measured: shm, shared memory: nothing reaches it"]


@pytest.mark.parametrize("area", [SHARED, NVLINK, Area("ucx", "private")])
def test_a_machine_of_noise_keeps_the_defaults(monkeypatch: pytest.MonkeyPatch, area: Area) -> None:
    profile = tuned_on(monkeypatch, area, lambda *_: 100.0)
    assert profile.is_empty
    assert "The defaults are as good as anything" in summary(profile)


def test_a_gain_that_does_not_last_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # Fast while candidates are tried, and slow when the profile is validated.
    def speed(section: Section, point: Point) -> float:
        rule = section.rule_for(point.op, *point.sizes)
        if rule.engine == "auto":
            return 100.0
        return 50.0 if rule.max_run_bytes > 1 << 40 else 200.0

    profile = tuned_on(monkeypatch, SHARED, speed)
    assert profile.is_empty
    assert {check.verdict for check in profile.checks} == {"taken back"}


# Records.


@pytest.fixture
def h200s() -> SweepReport:
    data = (RECORDS / "2026-11-29-h200x2-pages.json").read_bytes()
    return msgspec.json.decode(data, type=SweepReport)


def test_recorded_rows_of_h200s_show_that_eight_sms_are_enough(h200s: SweepReport) -> None:
    trials = Trials()
    for row in h200s.results:
        for name in (DEFAULT, AGAIN) if row.sm_count == 8 else (f"{row.sm_count} SMs",):
            for _ in range(5):
                trials.add(name, row)
    names = ["16 SMs", "32 SMs", "132 SMs"]
    assert len(trials.points) == 16
    assert fit.best_by_point(trials, names, min_gain=0.10) == {}
    # Were SMs free, writes would take more: 361 GB/s instead of 342 at 2 KiB.
    free = fit.best_by_point(trials, names)
    assert {point.op for point in free} == {"put"}
    assert set(free.values()) <= {"32 SMs", "132 SMs"}
