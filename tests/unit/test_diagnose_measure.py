"""Measuring between GPUs, on nodes with planted faults; and the process that measures."""

import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from diagnose_nodes import HostNode, pcie_node, switched_node

from kvxfer.diagnose.checks import run_checks
from kvxfer.diagnose.figures import (
    ALL_PAIRS,
    ALL_TO_ONE,
    BOTH_WAYS,
    ENGINE,
    KERNEL,
    LATENCY,
    ONE_TO_ALL,
    PAGED,
    Figures,
)
from kvxfer.diagnose.limits import with_limits
from kvxfer.diagnose.measure.events import Begun, BusyPcie, Ended, Event, Measured, Skipped, Task
from kvxfer.diagnose.measure.main import run_task
from kvxfer.diagnose.measure.node import PAGE_BYTES, Copy
from kvxfer.diagnose.measure.pairs import measure_crowds, measure_pairs
from kvxfer.diagnose.measure.runner import Collector, run_measurements
from kvxfer.diagnose.measure.schedule import Schedule
from kvxfer.diagnose.result import CheckResult, Verdict
from kvxfer.errors import CudaError

TASK = Task(
    numa_cpus={0: (0,)},
    area_bytes=1 << 20,
    host_bytes=4 << 20,
    rounds=2,
    budget_s=60.0,
    num_threads=1,
)


def measured(node: HostNode) -> Figures:
    collector = Collector(lambda what: None)
    schedule = Schedule(collector.take, rounds=3, deadline_s=time.monotonic() + 60)
    measure_pairs(node, schedule)
    measure_crowds(node, schedule)
    return collector.figures


def judged(node: HostNode) -> dict[str, CheckResult]:
    facts = switched_node(len(node.gpus))
    return {one.check: one for one in run_checks(facts, with_limits(facts, measured(node)))}


def test_every_pair_is_measured_in_every_way() -> None:
    figures = measured(HostNode(3))
    for kind, count in ((ENGINE, 6), (KERNEL, 6), (PAGED, 6), (LATENCY, 6), (BOTH_WAYS, 3)):
        assert len({one.key for one in figures.of(kind)}) == count, kind
    for kind, count in ((ALL_TO_ONE, 3), (ONE_TO_ALL, 3), (ALL_PAIRS, 1)):
        assert len(figures.of(kind)) == count, kind
    assert all(one.is_right for one in figures.all)
    for kind, rate in ((ENGINE, 400), (BOTH_WAYS, 800), (ALL_TO_ONE, 800), (ALL_PAIRS, 2400)):
        assert all(one.gb_per_s == pytest.approx(rate) for one in figures.of(kind)), kind


def test_two_gpus_are_no_crowd() -> None:
    figures = measured(HostNode(2))
    assert not figures.of(ALL_PAIRS)
    assert "crowds" in figures.skipped


def only(src: int, dst: int) -> Callable[[Copy], bool]:
    return lambda copy: (copy.src, copy.dst) == (src, dst)


def test_a_corrupting_link_fails() -> None:
    def corrupt(copy: Copy, data: np.ndarray) -> None:  # type: ignore[type-arg]
        if only(1, 2)(copy) and copy.num_pages > 8:
            data[copy.pages()[1][7], 5] ^= np.uint64(1 << 40)

    found = judged(HostNode(3, corrupt=corrupt))["bytes"]
    assert found.verdict is Verdict.FAIL
    pairs = {one.where for one in found.findings if "all" not in one.where}
    kinds = (ENGINE, KERNEL, PAGED, BOTH_WAYS)
    assert pairs == {f"{kind} gpu1 -> gpu2" for kind in kinds}


@pytest.mark.parametrize(
    "lose",
    [
        lambda data, pages: data.__setitem__(pages[3], data[pages[4]]),  # a page twice
        lambda data, pages: data.__setitem__(pages[[3, 4]], data[pages[[4, 3]]]),  # exchanged
        lambda data, pages: data.__setitem__(pages[9], 0),  # a page that did not arrive
    ],
)
def test_pages_that_are_lost_or_exchanged_are_found(
    lose: Callable[[np.ndarray, np.ndarray], None],  # type: ignore[type-arg]
) -> None:
    node = HostNode(2, corrupt=lambda copy, data: lose(data, copy.pages()[1]))
    assert all(one.num_wrong for one in measured(node).of(ENGINE, PAGED))


def test_bytes_of_the_round_before_do_not_pass() -> None:
    """A copy that does nothing leaves what the round before brought."""
    kept: dict[tuple[int, int], np.ndarray] = {}  # type: ignore[type-arg]

    def drop(copy: Copy, data: np.ndarray) -> None:  # type: ignore[type-arg]
        data[:] = kept.setdefault((copy.src, copy.dst), data.copy())

    assert all(one.num_wrong for one in measured(HostNode(2, corrupt=drop)).of(ENGINE))


def test_a_throttled_link_is_a_warning() -> None:
    node = HostNode(4, gb_per_s=lambda copy: 320.0 if only(1, 2)(copy) else 400.0)
    found = judged(node)
    assert found["bytes"].verdict is Verdict.PASS
    assert found["outliers"].verdict is Verdict.WARN
    assert any(one.where == f"{ENGINE} gpu1 -> gpu2" for one in found["outliers"].findings)
    assert [one.where for one in found["pair-rate"].findings] == [f"{ENGINE} gpu1 -> gpu2"]


def test_a_slow_path_moves_fewer_bytes_a_round() -> None:
    area_bytes = 320 * PAGE_BYTES
    slow = measured(HostNode(2, area_bytes=area_bytes, gb_per_s=lambda copy: 0.005))
    fast = measured(HostNode(2, area_bytes=area_bytes))
    (one, other) = (figures.of(ENGINE)[0] for figures in (slow, fast))
    assert one.num_bytes < other.num_bytes
    assert one.gb_per_s == pytest.approx(0.005)


def test_a_pair_that_fails_does_not_end_the_others() -> None:
    class Failing(HostNode):
        def run(self, copies: "list[Copy]") -> float:  # type: ignore[override]
            if any(only(0, 1)(copy) for copy in copies):
                raise CudaError("the GPU failed", 719)
            return super().run(copies)

    figures = measured(Failing(3))
    errors = [one.where for one in figures.all if one.error]
    assert f"{ENGINE} gpu0 -> gpu1" in errors
    assert figures.get(ENGINE, "gpu1", "gpu0") is not None
    assert all("gpu1 -> gpu2" not in where for where in errors)


def test_nothing_begins_after_the_deadline() -> None:
    events: list[Event] = []
    schedule = Schedule(events.append, rounds=1, deadline_s=time.monotonic())
    measure_pairs(HostNode(3), schedule)
    assert events == [Skipped("pairs of GPUs", "no time was left for it")]


def test_the_limit_of_a_pair_is_read_off_its_links() -> None:
    facts = switched_node(2, num_links=12)
    figures = with_limits(facts, measured(HostNode(2)))
    (figure, *_) = figures.of(ENGINE)
    assert figure.limit_gb_per_s == pytest.approx(12 * 26.562)
    assert figure.limit_source == "12 active NVLinks x their rate"
    (both,) = figures.of(BOTH_WAYS)
    assert both.limit_gb_per_s == pytest.approx(24 * 26.562)
    (figure, *_) = with_limits(pcie_node(2), measured(HostNode(2))).of(ENGINE)
    assert figure.limit_gb_per_s == pytest.approx(16 * 32 * 128 / 130 / 8)


def test_the_host_is_measured_between_processes() -> None:
    events: list[Event] = []
    run_task(TASK, events.append)
    figures = [event.figure for event in events if isinstance(event, Measured)]
    assert [one.kind for one in figures] == ["memcpy in one process", "memcpy", "paged memcpy"]
    assert all(one.is_right and one.gb_per_s and one.rounds == 2 for one in figures)
    assert isinstance(events[-1], Ended)


def program(*events: Event, then: str = "") -> tuple[str, ...]:
    lines = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
    code = f"import sys, time, os\nsys.stdin.readline()\nos.write(1, {lines!r})\n{then}"
    return sys.executable, "-c", code


BEGUN = Begun(PAGED, "gpu2", "gpu5")


def test_a_process_that_dies_names_what_it_measured() -> None:
    figures = run_measurements(TASK, program=program(BEGUN, then="os._exit(9)"))
    (figure,) = figures.all
    assert figure.key == (PAGED, "gpu2", "gpu5")
    assert figure.error == "the measuring process ended with status 9"


def test_a_process_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_START_S", "_GRACE_S", "_END_S"):
        monkeypatch.setattr(f"kvxfer.diagnose.measure.runner.{name}", 0.5)
    task = msgspec.structs.replace(TASK, budget_s=0.0)
    figures = run_measurements(task, program=program(BEGUN, then="time.sleep(60)"))
    assert "did not end in time" in figures.all[0].error
    assert figures.skipped


def test_a_process_that_talks_nonsense_is_no_crash() -> None:
    with_nonsense = program(BEGUN, then="os.write(1, b'nonsense\\n')")
    figures = run_measurements(TASK, program=with_nonsense)
    assert "said b'nonsense'" in figures.all[0].error


def test_what_a_process_said_is_kept() -> None:
    told: list[str] = []
    link = msgspec.structs.replace(switched_node(1).gpu(0).pcie, generation=4)
    events = (BEGUN, BusyPcie(3, link), Skipped("crowds", "too few"), Ended())
    figures = run_measurements(TASK, program=program(*events), tell=told.append)
    assert (figures.busy_pcie, figures.skipped) == ({3: link}, {"crowds": "too few"})
    assert told == ["paged gpu2 -> gpu5"]
    assert figures.all == []
