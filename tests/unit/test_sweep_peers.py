"""Pages moved by what others use: the rows, the real movers, and faults planted in them."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_libraries import FakeMooncake, FakeNixl

from kvxfer.cli.main import main
from kvxfer.errors import (
    InvalidUsage,
    KvxferError,
    NotAvailable,
    PeerLost,
    TransferFailed,
    VerificationError,
)
from kvxfer.layout import CopyPlan
from kvxfer.sweep import SweepOptions, SweepRun, expand_cases
from kvxfer.sweep.agent import Agent
from kvxfer.sweep.cases import SweepCase
from kvxfer.sweep.measure import Measurement
from kvxfer.sweep.peers import PEERS, process
from kvxfer.sweep.peers.cases import add_peers
from kvxfer.sweep.peers.library import Mover, PeerLibrary, Row
from kvxfer.sweep.peers.measure import connect, measure_peer
from kvxfer.sweep.peers.pages import pages_of
from kvxfer.sweep.peers.registry import row_of
from kvxfer.sweep.peers.task import PeerTask
from kvxfer.sweep.result import SweepResult
from kvxfer.sweep.rig import BlockTables, Rig, RigSpec
from kvxfer.transport import Op, Transfer, Tuning

OPTIONS = SweepOptions(
    transport="loopback", page_bytes=(4096,), total_bytes=1 << 20, memory=("private",), iters=2
)
HOST_ROWS = ("memcpy", "process-vm", "nixl", "nixl-tuned", "mooncake")


def case_of(row: str, op: str = "put") -> SweepCase:
    (case,) = expand_cases(replace(OPTIONS, ops=(op,)), transport="loopback")
    return replace(case, peer=row)


def task_of(case: SweepCase) -> PeerTask:
    return PeerTask(case=case, devices=(-1, -1), num_threads=2, iters=2, warmup=1, seed=0)


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL and Mooncake need not be installed: theirs are replaced, our use of them is real."""
    monkeypatch.setattr("kvxfer.sweep.peers.nixl._load", FakeNixl)
    monkeypatch.setattr("kvxfer.sweep.peers.mooncake.import_module", lambda _: FakeMooncake())


# Movers between two pools of this process.


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("op", ["put", "get"])
@pytest.mark.parametrize("row", HOST_ROWS)
def test_every_byte_of_a_healthy_library_is_right(agent: Agent, row: str, op: str) -> None:
    rounds: list[None] = []
    result = measure_peer(task_of(case_of(row, op)), agent, lambda: rounds.append(None))
    assert result.verified
    assert len(rounds) in (2, 4)  # twice where the contiguous copy was beaten
    assert (result.transport, result.peer, result.op) == (f"{row} (peer)", row, op)
    assert result.settings
    assert result.sm_budget == ""
    assert result.actual_path
    assert result.total_bytes == 1 << 20


class Planted(Mover):
    """A mover whose copies go wrong from copy number ``start`` on."""

    settings = "planted"

    def __init__(self, real: Mover, change: Callable[[CopyPlan], CopyPlan], start: int) -> None:
        self.real, self.change, self.left = real, change, start

    def ready(self, plan: CopyPlan) -> Callable[[], Transfer]:
        self.left -= 1
        return self.real.ready(plan if self.left >= 0 else self.change(plan))

    def close(self) -> None:
        self.real.close()


def swap_two_pages(plan: CopyPlan) -> CopyPlan:
    segments = plan.segments.copy()
    segments[[0, -1], 1] = segments[[-1, 0], 1]
    return replace(plan, segments=segments)


def leave_one_out(plan: CopyPlan) -> CopyPlan:
    (box,) = plan.boxes
    return replace(plan, boxes=(box._replace(num_segments=box.num_segments - 1),))


def run_planted(
    agent: Agent, row: str, op: str, change: Callable[[CopyPlan], CopyPlan], start: int
) -> SweepResult:
    case = case_of(row, op)
    spec = RigSpec(
        layout=case.layout,
        num_blocks=case.pool_blocks,
        transport="loopback",
        memory="private",
        op=case.op,
        num_threads=1,
        devices=(-1, -1),
    )
    with Rig(spec, agent) as rig, Planted(connect(rig, agent, row), change, start) as mover:
        return Measurement(
            case,
            rig,
            tuning=Tuning(),
            iters=2,
            warmup=0,
            seed=0,
            mover=mover,
        ).run()


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("start", [0, 2])  # the proof, the last round
@pytest.mark.parametrize("change", [swap_two_pages, leave_one_out])
@pytest.mark.parametrize("op", ["put", "get"])
@pytest.mark.parametrize("row", HOST_ROWS)
def test_a_wrong_copy_is_found(
    agent: Agent, row: str, op: str, change: Callable[[CopyPlan], CopyPlan], start: int
) -> None:
    with pytest.raises(VerificationError, match=r"the request: .* words are wrong"):
        run_planted(agent, row, op, change, start)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("nixl", ("fake_libraries.FakeNixl.end", "ERR")),
        ("mooncake", ("fake_libraries.FakeEngine.status", -1)),
    ],
)
def test_a_library_that_fails_is_not_timed(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, row: str, fault: tuple[str, object]
) -> None:
    monkeypatch.setattr(*fault)
    with pytest.raises(TransferFailed):
        measure_peer(task_of(case_of(row)), agent, lambda: None)


def test_the_end_of_a_process_is_seen(agent: Agent) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    case = case_of("process-vm")
    plan = CopyPlan.contiguous(1 << 20, 2 << 20, 4096)
    ends = {"op": Op.PUT, "contact": str(child).encode(), "page_bytes": 4096, "num_threads": 1}
    mover = row_of(case.peer)[0].connect(any_ends(**ends), Row("process-vm"))
    with mover, pytest.raises(PeerLost, match=f"of process {child}: No such process"):
        mover.ready(plan)()


def any_ends(**changed: Any) -> Any:
    class Ends:
        near_address = mapped_address = far_address = 0
        near_device = far_device = -1

    for name, value in changed.items():
        setattr(Ends, name, value)
    return Ends


# The tuned row differs in what it says and in what it asks for.


@pytest.mark.usefixtures("fakes")
def test_settings_are_what_was_asked_for(agent: Agent) -> None:
    found = {}
    for row in ("nixl", "nixl-tuned"):
        FakeNixl.asked.clear()
        result = measure_peer(task_of(case_of(row)), agent, lambda: None)
        found[row] = (result.settings, list(FakeNixl.asked))
    text, asked = found["nixl"]
    assert text.endswith("defaults")
    assert asked == [(True, {}), (True, {})]  # the far side's agent, then the near side's
    text, asked = found["nixl-tuned"]
    assert "NIXL_UCX_SGL_ENABLE=1, ucx_error_handling_mode=none" in text
    assert asked == [
        (True, {"ucx_error_handling_mode": "none"}),
        (False, {"ucx_error_handling_mode": "none"}),
    ]


@pytest.mark.parametrize(("row", "value"), [("nixl", None), ("nixl-tuned", "1")])
def test_the_environment_of_a_row(row: str, value: str | None) -> None:
    assert row_of(row)[1].environment == {"NIXL_UCX_SGL_ENABLE": value}


# Pages.


def test_pages_are_those_of_the_plan(agent: Agent) -> None:
    case = case_of("memcpy")
    layout, page_bytes = case.layout, case.layout.page_bytes
    spec = RigSpec(
        layout=layout,
        num_blocks=8,
        transport="loopback",
        memory="private",
        op=Op.PUT,
        num_threads=1,
        devices=(-1, -1),
    )
    with Rig(spec, agent) as rig:
        tables = BlockTables(np.array([5, 0, 7]), np.array([1, 6, 2]))
        plan = rig.peer.plan(Op.PUT, tables.source, tables.destination)
        pages = pages_of(plan, page_bytes)
        starts = (rig.local.start_address, int(rig.peer.view.addresses[0, 0]))
    sides = ((pages.src, tables.source), (pages.dst, tables.destination))
    for start, (addresses, ids) in zip(starts, sides, strict=True):
        wanted = [
            start + (plane * 8 + block) * page_bytes
            for plane in range(layout.num_planes)
            for block in ids.tolist()
        ]
        assert addresses.tolist() == wanted


def test_a_plan_of_something_else_than_pages_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="whole pages of 4096 bytes"):
        pages_of(CopyPlan.contiguous(4096, 8192, 100), 4096)


# Rows of a sweep.


class Library(PeerLibrary):
    name = "fake"

    def __init__(self, *memory: str, modules: tuple[str, ...] = ()) -> None:
        self.memory, self.modules, self.install = memory, modules, "pip install fake"

    @property
    def rows(self) -> tuple[Row, ...]:
        return (Row("fake"), Row("fake-tuned"))

    def connect(self, ends: Any, row: Row) -> Mover:
        raise NotImplementedError


def cases_with(monkeypatch: pytest.MonkeyPatch, library: Any, **options: Any) -> Any:
    monkeypatch.setitem(PEERS, "fake", library)
    changed = replace(OPTIONS, page_bytes=(4096, 8192), **options)
    own = expand_cases(changed, transport=options.get("transport", "shm"))
    return add_peers(own, ["fake"])


def test_each_shape_is_moved_once_in_the_best_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found, skipped = cases_with(
        monkeypatch, Library("private", "shared"), memory=("shared", "private")
    )
    assert skipped == []
    assert [(case.layout.page_bytes, case.memory, case.peer) for case in found] == [
        (4096, "shared", ""),
        (4096, "private", ""),
        (4096, "private", "fake"),
        (4096, "private", "fake-tuned"),
        (8192, "shared", ""),
        (8192, "private", ""),
        (8192, "private", "fake"),
        (8192, "private", "fake-tuned"),
    ]
    assert found[2].label.startswith("fake (peer)/private put raw")


def test_budgets_of_sms_are_of_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = cases_with(monkeypatch, Library("device"), transport="nvlink", sms=(8, 16))
    assert [(case.num_sms, case.peer) for case in found[:4]] == [
        (8, ""),
        (16, ""),
        (0, "fake"),
        (0, "fake-tuned"),
    ]


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (Library("device"), "moves pages in device memory; this run has private, shared"),
        (Library("shared", modules=("no_such_one",)), "not installed: pip install fake"),
    ],
)
def test_a_peer_that_cannot_be_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, library: Library, reason: str
) -> None:
    found, (skipped,) = cases_with(monkeypatch, library, memory=("shared", "private"))
    assert (skipped.case, skipped.reason, skipped.failed) == ("fake", reason, False)
    assert all(not case.peer for case in found)


@pytest.mark.parametrize(
    ("error", "failed"),
    [(NotAvailable("no path"), False), (PeerLost("ended"), True), (KvxferError("odd"), True)],
)
def test_a_sweep_goes_on_after_a_peer(
    monkeypatch: pytest.MonkeyPatch, error: KvxferError, failed: bool
) -> None:
    def fail(*_: Any) -> SweepResult:
        raise error

    monkeypatch.setattr("kvxfer.sweep.runner.measure_apart", fail)
    options = replace(OPTIONS, transport="shm", memory=("shared",), peers=("memcpy",), iters=1)
    with SweepRun(options) as run:
        own, peer = run.cases
        assert run.run_case(peer) is None
        (skipped,) = run.report.skipped
        assert (skipped.reason, skipped.failed) == (str(error), failed)
        assert run.run_case(own) is not None
        assert run.report.failed == failed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peers", "nixl,rsync"], "--peers: 'rsync'; use nixl or mooncake or memcpy"),
        (["--peers", ","], "--peers: ',' names nothing"),
        (["--peers", "memcpy", "--transport", "loopback"], "--peers is of two processes"),
        (["--peers", "memcpy", "--tp", "1:1"], "--peers is of one pair"),
    ],
)
def test_wrong_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--transport", "shm", "--tokens", "16", *words]) == 2
    assert message in capsys.readouterr().err


# The process of a library.


def test_a_process_that_ends_is_named_with_its_last_words() -> None:
    task = task_of(case_of("memcpy"))
    with pytest.raises(PeerLost, match=r"of memcpy ended with status 1: .*No module named no_such"):
        process.measure_apart(task, lambda: None, main="no_such")
    with pytest.raises(PeerLost, match=r"of memcpy ended with status 0$"):
        process.measure_apart(task, lambda: None, main="kvxfer.units")


def test_an_error_of_the_process_is_raised_here() -> None:
    impossible = replace(case_of("memcpy"), transport="shm", pool_blocks=1 << 40)
    with pytest.raises(NotAvailable, match="of memory free"):
        process.measure_apart(task_of(impossible), lambda: None)


def test_variables_are_set_and_unset(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with (tmp_path / "log").open("wb") as log:
        child = process._start({"A": "1", "B": None}, "kvxfer.units", writer, log)
        process._end(child)
    os.close(reader)
    os.close(writer)
    assert isinstance(child.args, list)
    assert child.args[:4] == ["env", "-u", "B", "A=1"]
