"""Each check of ``kvxfer diagnose`` fails, passes and steps aside where it should."""

from collections.abc import Callable
from pathlib import Path

import pytest
from captures import CASES, write_capture
from diagnose_nodes import NVLINK, PCIE5, healthy_figures, pcie_node, switched_node
from msgspec.structs import replace

from kvxfer.diagnose.checks import CHECKS, run_checks
from kvxfer.diagnose.checks.nics import assign_nics, data_nics
from kvxfer.diagnose.facts import Facts, GpuPair, Nic, NicPort
from kvxfer.diagnose.figures import (
    ALL_TO_ONE,
    BOTH_WAYS,
    ENGINE,
    LATENCY,
    NIC_GPU,
    NIC_HOST,
    PAGED,
    PAGED_MEMCPY,
    PINNED,
    Figure,
    Figures,
)
from kvxfer.diagnose.limits import with_limits
from kvxfer.diagnose.result import CheckResult, Verdict
from kvxfer.diagnose.run import diagnose_folder

Change = Callable[[Figure], Figure]


def judge(facts: Facts, figures: Figures) -> dict[str, CheckResult]:
    return {one.check: one for one in run_checks(facts, with_limits(facts, figures))}


def slowed(fraction: float, *names: str) -> Change:
    """Those of a kind, source or destination by these names are slower."""

    def change(one: Figure) -> Figure:
        if one.gb_per_s is None or not set(names) <= {*one.key, "->".join(one.key[1:])}:
            return one
        return replace(one, gb_per_s=one.gb_per_s * fraction)

    return change


def with_gpu(facts: Facts, index: int, **values: object) -> Facts:
    gpus = tuple(replace(gpu, **values) if gpu.index == index else gpu for gpu in facts.gpus or ())
    return replace(facts, gpus=gpus)


def with_pair(facts: Facts, src: int, dst: int, **values: object) -> Facts:
    def change(pair: GpuPair) -> GpuPair:
        return replace(pair, **values) if (pair.src, pair.dst) == (src, dst) else pair

    return replace(facts, pairs=tuple(map(change, facts.pairs)))


def test_a_healthy_node_passes() -> None:
    found = judge(switched_node(8), healthy_figures(8))
    assert [one.check for one in found.values() if one.findings] == []
    for check in ("bytes", "measured", "pair-rate", "outliers", "crowds", "host-device", "memcpy"):
        assert found[check].verdict is Verdict.PASS, check


@pytest.mark.parametrize(
    ("check", "change", "verdict", "words"),
    [
        ("pair-rate", slowed(0.8, ENGINE), Verdict.WARN, f"of {NVLINK:.4g} (18 active NVLinks"),
        ("pair-rate", slowed(0.4, ENGINE, "gpu2->gpu5"), Verdict.FAIL, "gpu2 -> gpu5"),
        ("outliers", slowed(0.85, ENGINE, "gpu2->gpu5"), Verdict.WARN, "the others 396"),
        ("outliers", slowed(0.3, PAGED, "gpu2->gpu5"), Verdict.FAIL, "gpu2 -> gpu5"),
        ("outliers", slowed(0.8, "gpu3"), Verdict.WARN, "with 14 partners"),
        ("kernels", slowed(0.5, PAGED, "gpu0->gpu1"), Verdict.WARN, "the copy engine 39"),
        ("both-ways", slowed(0.55, BOTH_WAYS, "gpu0->gpu1"), Verdict.WARN, "share something"),
        ("crowds", slowed(0.5, ALL_TO_ONE, "gpu4"), Verdict.WARN, "links of gpu4, one way"),
        ("host-device", slowed(0.5, PINNED, "gpu6"), Verdict.WARN, "PCIe generation 5, 16 lanes"),
        ("host-device", slowed(0.2, PINNED, "gpu6"), Verdict.FAIL, "gpu6"),
        ("possible", slowed(1.3, ENGINE), Verdict.WARN, "is 108% of 18 active NVLinks"),
        (
            "memcpy",
            slowed(0.3, PAGED_MEMCPY),
            Verdict.WARN,
            "of 12 (reference: fastest memcpy of numa0)",
        ),
    ],
)
def test_a_slow_part_is_found(check: str, change: Change, verdict: Verdict, words: str) -> None:
    found = judge(switched_node(8), healthy_figures(8, change))[check]
    assert found.verdict is verdict
    assert words in str(found.findings)


def test_two_gpus_are_compared_with_each_other() -> None:
    found = judge(switched_node(2), healthy_figures(2, slowed(0.8, ENGINE, "gpu1->gpu0")))
    (finding,) = found["outliers"].findings
    assert finding.where == f"{ENGINE} gpu1 -> gpu0"


def test_a_late_pair_is_found() -> None:
    def change(one: Figure) -> Figure:
        late = one.key == (LATENCY, "gpu1", "gpu7")
        return replace(one, latency_ns=3000.0) if late else one

    found = judge(switched_node(8), healthy_figures(8, change))["latency"]
    assert found.verdict is Verdict.WARN
    assert "3000 ns a read, the others 1100" in found.findings[0].evidence


def wrong_one(one: Figure) -> Figure:
    if one.key != (ENGINE, "gpu0", "gpu1"):
        return one
    return replace(one, gb_per_s=1.0, num_wrong=3, first_wrong="page 9")


def test_a_wrong_byte_outranks_all_that_is_slow() -> None:
    facts = switched_node(8)
    figures = with_limits(
        facts, healthy_figures(8, lambda one: wrong_one(slowed(0.4, ENGINE)(one)))
    )
    results = run_checks(facts, figures)
    assert results[0].check == "bytes"
    assert "3 wrong words of 8 bytes; first: page 9" in results[0].findings[0].evidence
    assert "CUDA says that the pair has peer access" in results[0].findings[0].cause
    rates = next(one for one in results if one.check == "pair-rate")
    assert all("gpu0 -> gpu1" not in one.where for one in rates.findings)


@pytest.mark.parametrize(
    ("host", "words"),
    [({"iommu": "translated"}, "iommu=pt"), ({"hypervisor": "QEMU"}, "hypervisor")],
)
def test_wrong_bytes_name_what_is_known_to_corrupt(host: dict[str, str], words: str) -> None:
    facts = switched_node(2)
    facts = replace(facts, host=replace(facts.host, **host))
    found = judge(facts, healthy_figures(2, wrong_one))["bytes"]
    assert found.verdict is Verdict.FAIL
    assert words in found.findings[0].remedy


def test_a_measurement_that_broke_off_is_a_failure() -> None:
    figures = healthy_figures(2)
    figures.all.append(Figure(kind=ENGINE, src="gpu0", dst="gpu1", error="it did not end"))
    found = judge(switched_node(2), figures)["measured"]
    assert (found.verdict, found.findings[0].evidence) == (Verdict.FAIL, "it did not end")


@pytest.mark.parametrize(
    ("values", "verdict", "words"),
    [
        ({"cuda_access": False}, Verdict.FAIL, "CUDA says no to peer access, NVML says read ok"),
        ({"read": "not supported", "write": "not supported"}, Verdict.FAIL, "CUDA says yes"),
        (
            {"cuda_access": False, "read": "GPU not supported", "write": "GPU not supported"},
            Verdict.WARN,
            "no peer access",
        ),
        ({"write": "chipset not supported"}, Verdict.FAIL, "read ok, write chipset not supported"),
        (
            {"write": "chipset not supported", "cuda_access": None},
            Verdict.WARN,
            "allowed in part: read ok, write chipset not supported",
        ),
        (
            {"read": None, "write": "disabled by regkey", "cuda_access": None},
            Verdict.WARN,
            "no peer access (write disabled by regkey)",
        ),
        (
            {"write": "chipset not supported", "cuda_access": False},
            Verdict.WARN,
            "no peer access (read ok, write chipset not supported)",
        ),
    ],
)
def test_who_denies_peer_access(values: dict[str, object], verdict: Verdict, words: str) -> None:
    facts = with_pair(pcie_node(2), 0, 1, **values)
    found = judge(facts, Figures())["p2p-access"]
    assert found.verdict is verdict
    assert words in found.findings[0].evidence


def test_peers_through_host_memory_are_not_judged_by_the_links() -> None:
    facts = with_pair(pcie_node(2), 0, 1, cuda_access=False, read="not supported", write=None)
    slow = Figure(kind=ENGINE, src="gpu0", dst="gpu1", gb_per_s=9.0, rounds=1)
    found = judge(facts, Figures(all=[slow]))
    assert not found["pair-rate"].findings
    assert found["p2p-access"].findings


def test_a_low_generation_counts_only_while_a_gpu_copies() -> None:
    slow = replace(PCIE5, generation=1)
    facts = with_gpu(switched_node(2), 1, pcie=slow)
    assert judge(facts, Figures())["pcie-speed"].verdict is Verdict.NOT_APPLICABLE
    found = judge(facts, Figures(busy_pcie={1: slow}))["pcie-speed"]
    assert "generation 1 in a copy, 5 at best" in found.findings[0].evidence
    assert judge(facts, healthy_figures(2))["pcie-speed"].verdict is Verdict.PASS


def test_errors_of_links_and_slow_clocks_are_found() -> None:
    facts = switched_node(2)
    links = facts.gpu(0).links or ()
    facts = with_gpu(facts, 0, links=(replace(links[0], num_errors=1200), *links[1:]))
    facts = with_gpu(facts, 1, slowdown="power brake")
    found = judge(facts, Figures())
    assert "1200 replays" in found["nvlink-errors"].findings[0].evidence
    assert "power brake" in found["clocks"].findings[0].evidence


def nic_at(name: str, gbit_per_s: float = 400.0, **paths: str) -> Nic:
    port = NicPort(number=1, state="active", gbit_per_s=gbit_per_s)
    near = {int(gpu.removeprefix("gpu")): path for gpu, path in paths.items()}
    return Nic(name=name, ports=(port,), paths=near)


def with_nic(facts: Facts, path: str = "PIX") -> Facts:
    return replace(facts, nics=(nic_at("mlx5_0", gpu0=path),))


def test_a_nic_on_the_other_socket_is_found() -> None:
    found = judge(with_nic(switched_node(2), "SYS"), Figures())["nic-affinity"]
    assert found.findings[0].where == "GPU 0"
    assert "mlx5_0, is on another socket" in found.findings[0].evidence


def test_gpus_share_equally_near_nics_and_leave_slow_ones_out() -> None:
    nics = (
        nic_at("mgmt", 100.0, gpu0="PIX", gpu1="PIX", gpu2="PIX", gpu3="PIX"),
        nic_at("a", gpu0="NODE", gpu1="NODE", gpu2="SYS", gpu3="SYS"),
        nic_at("b", gpu0="NODE", gpu1="NODE", gpu2="NODE", gpu3="NODE"),
    )
    facts = switched_node(4)
    chosen = assign_nics(facts.gpus or (), data_nics(nics))
    assert chosen == {0: "a", 1: "b", 2: "b", 3: "b"}


def test_a_driver_that_starts() -> None:
    facts = switched_node(2)
    facts = replace(facts, host=replace(facts.host, cuda_status=0))
    assert judge(facts, Figures())["cuda-start"].evidence == "driver 580.95.05"


@pytest.mark.parametrize(
    ("host", "gpu", "words"),
    [
        (48.0, 47.0, ""),
        (30.0, 29.0, "fewer PCIe lanes"),
        (12.0, 12.0, "fewer PCIe lanes"),
        (48.0, 20.0, "path: PIX"),
    ],
)
def test_rates_of_nics(host: float, gpu: float, words: str) -> None:
    rates = ((NIC_HOST, host), (NIC_GPU, gpu))
    figures = [Figure(kind=kind, src="mlx5_0", dst="mlx5_0", gb_per_s=rate) for kind, rate in rates]
    found = judge(with_nic(switched_node(2)), Figures(all=figures))["nic-rate"]
    assert bool(found.findings) == bool(words)
    assert words in str(found.findings)


def bad_node() -> Facts:
    """Everything that no capture is wrong in."""
    facts = with_gpu(with_nic(switched_node(8), "SYS"), 0, slowdown="power brake")
    links = facts.gpu(2).links or ()
    return with_gpu(facts, 2, links=tuple(replace(link, num_errors=900) for link in links))


def bad_figures() -> Figures:
    def change(one: Figure) -> Figure:
        late = one.key == (LATENCY, "gpu4", "gpu5")
        return wrong_one(slowed(0.4, "gpu1")(replace(one, latency_ns=9000.0) if late else one))

    figures = healthy_figures(8, change)
    figures.all.append(Figure(kind=ENGINE, src="gpu0", dst="gpu1", error="it hung"))
    figures.busy_pcie[0] = replace(PCIE5, generation=3)
    return figures


def test_every_check_was_seen_to_fail_to_pass_and_to_step_aside(tmp_path: Path) -> None:
    """In captures and composed nodes together; a check without one of the three is none."""
    seen: dict[str, set[str]] = {check.name: set() for check in CHECKS}
    reports = [diagnose_folder(write_capture(name, tmp_path / name)).checks for name in CASES]
    good = switched_node(8)
    started = replace(good, host=replace(good.host, cuda_status=0))
    reports.append(list(judge(bad_node(), bad_figures()).values()))
    reports.append(list(judge(started, healthy_figures(8)).values()))
    reports.append(list(judge(good, healthy_figures(8, slowed(1.3, ENGINE))).values()))
    for kind in (PAGED_MEMCPY, BOTH_WAYS, PAGED):
        reports.append(list(judge(good, healthy_figures(8, slowed(0.3, kind))).values()))
    for result in (one for report in reports for one in report):
        seen[result.check].add("bad" if result.findings else result.verdict.value)
    assert {name: kinds for name, kinds in seen.items() if kinds != {"bad", "PASS", "N/A"}} == {}
