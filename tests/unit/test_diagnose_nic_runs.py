"""Which NICs are measured, by what, and why not; the measuring itself is in tests/integration."""

import msgspec
import pytest
from diagnose_nodes import switched_node

import kvxfer.diagnose.measure.nic_runs as nic_runs
from kvxfer.diagnose.checks import run_checks
from kvxfer.diagnose.facts import Facts, Nic, NicPort
from kvxfer.diagnose.figures import NIC_HOST, Figure, Figures
from kvxfer.diagnose.limits import with_limits
from kvxfer.diagnose.measure.events import Task
from kvxfer.diagnose.measure.nics import nic_environment
from kvxfer.diagnose.result import CheckResult, Verdict
from kvxfer.transport.network_libraries import NetworkLibrary

TASK = Task(
    devices={0: 0},
    pcis={0: "0000:1a:00.0"},
    numa_cpus={0: (0, 1), 1: (2, 3)},
    area_bytes=1 << 20,
    host_bytes=4 << 20,
    rounds=2,
    budget_s=60.0,
    num_threads=1,
)


def nic(name: str, *states: str, software: bool = False, numa_node: int | None = None) -> Nic:
    ports = tuple(
        NicPort(number=number, state=state, gbit_per_s=200.0)
        for number, state in enumerate(states, 1)
    )
    return Nic(name=name, ports=ports, software=software, numa_node=numa_node)


def node(*nics: Nic) -> Facts:
    return msgspec.structs.replace(switched_node(2), nics=nics)


def with_ucx(monkeypatch: pytest.MonkeyPatch, *, has_verbs: bool) -> None:
    found = NetworkLibrary("1.22.0", "system", has_verbs, has_cuda=False)
    monkeypatch.setattr(nic_runs, "ucx_library", lambda: found)


@pytest.mark.parametrize(
    ("nics", "budget_s", "has_verbs", "words"),
    [
        ((), 9.0, True, "no RDMA device here"),
        ((nic("siw0", "active", software=True),), 9.0, True, "no RDMA device here"),
        ((nic("mlx5_0", "down"),), 9.0, True, "no RDMA device is up"),
        ((nic("mlx5_0", "active"),), 0.0, True, "--quick"),
        ((nic("mlx5_0", "active"),), 9.0, False, "knows no RDMA devices"),
    ],
)
def test_what_is_not_measured_has_a_reason(
    nics: tuple[Nic, ...],
    budget_s: float,
    has_verbs: bool,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_ucx(monkeypatch, has_verbs=has_verbs)
    figures = Figures()
    nic_runs.add_nics(figures, node(*nics), TASK, budget_s=budget_s, tell=lambda what: None)
    assert words in figures.skipped["NICs"]
    assert figures.all == []
    found = {one.check: one for one in run_checks(node(*nics), figures)}["nic-rate"]
    assert found.verdict is Verdict.NOT_APPLICABLE
    assert words in found.evidence


def test_each_device_that_is_up_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Task, dict[str, str]]] = []

    def run(task: Task, *, variables: dict[str, str], tell: object) -> Figures:
        asked.append((task, variables))
        return Figures(all=[Figure(kind=NIC_HOST, src=task.nic, dst=task.nic, gb_per_s=20.0)])

    with_ucx(monkeypatch, has_verbs=True)
    monkeypatch.setattr(nic_runs, "run_measurements", run)
    nics = (
        nic("mlx5_0", "active", "active", numa_node=1),
        nic("mlx5_1", "down"),
        nic("mlx5_2", "down", "active", numa_node=7),
    )
    figures = Figures(skipped={"crowds": "two GPUs"})
    nic_runs.add_nics(figures, node(*nics), TASK, budget_s=9.0, tell=lambda what: None)
    assert [task.nic for task, _ in asked] == ["mlx5_0", "mlx5_2"]
    assert [task.devices for task, _ in asked] == [{}, {}]
    assert [task.numa_cpus for task, _ in asked] == [{1: (2, 3)}, TASK.numa_cpus]
    assert [one["UCX_NET_DEVICES"] for _, one in asked] == ["mlx5_0:1,lo", "mlx5_2:2,lo"]
    assert len(figures.all) == 2
    assert figures.skipped == {"crowds": "two GPUs"}


def test_the_environment_names_one_device() -> None:
    found = nic_environment("mlx5_0", 2)
    assert found["UCX_NET_DEVICES"] == "mlx5_0:2,lo"
    assert found["UCX_TLS"] == "^sm"
    assert found["UCX_MAX_RMA_RAILS"] == "1"
    assert nic_environment("lo")["UCX_NET_DEVICES"] == "lo"


def rated(
    gb_per_s: float, *, best_gb_per_s: float | None = None, num_wrong: int = 0
) -> dict[str, CheckResult]:
    facts = node(nic("mlx5_0", "active"))  # 25 GB/s
    figure = Figure(
        kind=NIC_HOST,
        src="mlx5_0",
        dst="mlx5_0",
        gb_per_s=gb_per_s,
        best_gb_per_s=best_gb_per_s,
        rounds=2,
        num_bytes=1 << 20,
        num_wrong=num_wrong,
        first_wrong="word 3" if num_wrong else "",
    )
    figures = with_limits(facts, Figures(all=[figure]))
    return {one.check: one for one in run_checks(facts, figures)}


@pytest.mark.parametrize(
    ("gb_per_s", "verdict"), [(24.0, Verdict.PASS), (15.0, Verdict.WARN), (2.0, Verdict.WARN)]
)
def test_a_slow_loopback_is_a_warning(gb_per_s: float, verdict: Verdict) -> None:
    assert rated(gb_per_s)["nic-rate"].verdict is verdict


def test_a_loopback_is_judged_by_its_best_round() -> None:
    assert rated(8.0, best_gb_per_s=22.0)["nic-rate"].verdict is Verdict.PASS


def test_a_loopback_may_pass_its_port() -> None:
    found = rated(40.0)
    assert found["nic-rate"].verdict is Verdict.PASS
    assert found["possible"].verdict is Verdict.NOT_APPLICABLE


def test_wrong_bytes_through_a_nic_fail() -> None:
    found = rated(24.0, num_wrong=1)["bytes"]
    assert found.verdict is Verdict.FAIL
    assert "word 3" in found.findings[0].evidence
