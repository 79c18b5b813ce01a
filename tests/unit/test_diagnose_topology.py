"""Matrices of ``nvidia-smi topo`` beyond those of the captures, and who is joined by NVLink."""

from pathlib import Path

import msgspec
import pytest
from diagnose_nodes import switched_node

from kvxfer.diagnose.checks import run_checks
from kvxfer.diagnose.expected import may_be_unlinked
from kvxfer.diagnose.facts import Facts, Gpu, GpuPair, NvLink
from kvxfer.diagnose.figures import Figures
from kvxfer.diagnose.inventory.kernel_log import parse_xids
from kvxfer.diagnose.inventory.smi_text import parse_nvlink, parse_query
from kvxfer.diagnose.inventory.topo_text import parse_topo
from kvxfer.diagnose.result import CheckResult, Verdict
from kvxfer.diagnose.run import diagnose_folder

TWO = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV4\t0-7\t0\nGPU1\tNV4\t X \t8-15\t1\n"


def test_a_column_of_an_unknown_kind_keeps_its_place() -> None:
    text = (
        "\tGPU0\tqedr0\tGPU1\thfi1_0\tmlx5_ib0\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\t X \tPIX\tNV4\tSYS\tNODE\t0-7\t0\n"
        "GPU1\tNV4\tPHB\t X \tPXB\tSYS\t8-15\t1\n"
    )
    topology = parse_topo(text)
    assert topology.nics == ["qedr0", "hfi1_0", "mlx5_ib0"]
    assert topology.path("GPU0", "GPU1") == "NV4"
    assert topology.path("GPU0", "qedr0") == "PIX"
    assert topology.path("hfi1_0", "GPU1") == "PXB"
    assert topology.path("GPU1", "mlx5_ib0") == "SYS"
    assert topology.numa == {"GPU0": 0, "GPU1": 1}


def test_the_first_of_two_matrices_counts() -> None:
    topology = parse_topo(TWO + "\n" + TWO.replace("NV4", "SYS"))
    assert topology.path("GPU0", "GPU1") == "NV4"


def test_a_row_is_no_header() -> None:
    assert parse_topo("GPU0\t X \tNV4\n" + TWO).path("GPU0", "GPU1") == "NV4"
    assert parse_topo("GPU1\tC2C\t X \n" + TWO).path("GPU0", "GPU1") == "NV4"
    assert parse_topo("GPU0: a card\n").num_gpus == 0
    assert parse_topo("GPU0: a card\n" + TWO).num_gpus == 2


@pytest.mark.parametrize("glue", ["\t", ""])
def test_a_matrix_of_some_of_the_gpus(glue: str, tmp_path: Path) -> None:
    """As ``-i 4,6`` prints; nothing else of the node need be known."""
    (tmp_path / "topo.txt").write_text(
        f"\tGPU4{glue}GPU6\tCPU Affinity\tNUMA Affinity\n"
        "GPU4\t X \tNV18\t0-1\t0\nGPU6\tNV18\t X \t0-1\t1\n"
    )
    facts = diagnose_folder(tmp_path).facts
    assert [(gpu.index, gpu.numa_node) for gpu in facts.gpus or ()] == [(4, 0), (6, 1)]
    assert [(pair.src, pair.dst, pair.path) for pair in facts.pairs] == [
        (4, 6, "NV18"),
        (6, 4, "NV18"),
    ]


def test_a_row_that_was_cut_is_told_by_the_others() -> None:
    topology = parse_topo(TWO[: TWO.index("GPU1\tNV4")])
    assert (topology.num_gpus, topology.path("GPU1", "GPU0")) == (2, "NV4")


def test_more_rows_of_the_topology_than_gpus_are_no_crash(tmp_path: Path) -> None:
    (tmp_path / "topo.txt").write_text(TWO)
    (tmp_path / "query.txt").write_text("GPU 00000000:1A:00.0\n    Product Name : NVIDIA A40\n")
    assert len(diagnose_folder(tmp_path).facts.gpus or ()) == 1


def node(*rows: str, links: tuple[NvLink, ...] | None = None, name: str = "") -> Facts:
    gpus = tuple(Gpu(index=index, name=name, links=links) for index in range(len(rows)))
    pairs = tuple(
        GpuPair(src=src, dst=dst, path=path)
        for src, row in enumerate(rows)
        for dst, path in enumerate(row.split())
        if src != dst
    )
    return Facts(gpus=gpus, pairs=pairs)


def judged(facts: Facts, check: str) -> CheckResult:
    return next(one for one in run_checks(facts, Figures()) if one.check == check)


@pytest.mark.parametrize(
    ("rows", "verdict", "words"),
    [
        (("X NV4 NODE", "NV4 X NODE", "NODE NODE X"), Verdict.WARN, "GPU 2"),  # a bridge for two
        (
            ("X NV18 NV18 SYS", "NV18 X NV18 SYS", "NV18 NV18 X SYS", "SYS SYS SYS X"),
            Verdict.FAIL,
            "GPU 3",
        ),
        (("X NV18 NV17", "NV18 X NV17", "NV17 NV17 X"), Verdict.FAIL, "GPU 2"),
        # A V100 has one link to some and two to others, none to the rest.
        (
            ("X NV1 NV2 SYS", "NV1 X SYS NV2", "NV2 SYS X NV1", "SYS NV2 NV1 X"),
            Verdict.PASS,
            "",
        ),
        (("X SYS", "SYS X"), Verdict.NOT_APPLICABLE, ""),
    ],
)
def test_who_is_joined_by_nvlink(rows: tuple[str, ...], verdict: Verdict, words: str) -> None:
    found = judged(node(*rows), "nvlink-reach")
    assert found.verdict is verdict
    assert [one.where for one in found.findings] == ([words] if words else [])


def test_a_link_that_is_down_is_told_once() -> None:
    facts = node("X NV17 NV18", "NV17 X NV17", "NV18 NV17 X", links=(NvLink(index=0, active=True),))
    assert judged(facts, "nvlink-reach").verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100 80GB PCIe", True),
        ("NVIDIA A100-PCIE-40GB", True),
        ("NVIDIA H100 NVL", True),
        ("NVIDIA RTX A6000", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA H100 80GB HBM3", False),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA GB200", False),
        ("Tesla V100-SXM2-32GB", False),
    ],
)
def test_which_parts_may_have_no_link_up(name: str, expected: bool) -> None:
    assert may_be_unlinked(name) is expected
    down = tuple(NvLink(index=index, active=False) for index in range(12))
    found = judged(node("X SYS", "SYS X", links=down, name=name), "nvlink-links")
    assert found.verdict is (Verdict.NOT_APPLICABLE if expected else Verdict.FAIL)


def test_a_card_without_the_bridge_of_its_twins_is_a_warning() -> None:
    up = tuple(NvLink(index=index, active=True) for index in range(4))
    down = (NvLink(index=0, active=False),)
    facts = node("X NV4 NODE", "NV4 X NODE", "NODE NODE X", links=up, name="NVIDIA RTX A6000")
    gpus = facts.gpus or ()
    odd = (*gpus[:2], msgspec.structs.replace(gpus[2], links=down))
    found = judged(msgspec.structs.replace(facts, gpus=odd), "nvlink-links")
    assert found.verdict is Verdict.WARN
    assert [one.where for one in found.findings] == ["GPU 2"]


def test_links_that_the_tool_does_not_list_are_down() -> None:
    for words in (
        "NVML: Unable to retrieve NVLink information as all links are inActive",
        "NVML:Unable to retrieve Nvlink information as all links are inActive",
        "\t Unable to retrieve NVLink information as all links are inActive",
    ):
        (gpu,) = parse_nvlink(f"GPU 0: NVIDIA B200 (UUID: GPU-1)\n{words}\n")
        assert gpu.links == (NvLink(index=0, active=False),)


def fabric(*lines: str) -> CheckResult:
    text = "GPU 00000000:1A:00.0\n    Fabric\n" + "".join(f"        {line}\n" for line in lines)
    facts = msgspec.structs.replace(switched_node(1), gpus=tuple(parse_query(text)))
    return judged(facts, "fabric-state")


def test_what_a_fabric_says_of_its_bandwidth() -> None:
    done = ("State : Completed", "Status : Success", "Health")
    assert fabric(*done, "    Bandwidth : Full").verdict is Verdict.PASS
    found = fabric(*done, "    Bandwidth : Degraded")
    assert found.verdict is Verdict.WARN
    assert "degraded in bandwidth" in found.findings[0].evidence


def test_a_status_that_is_not_told_is_not_success() -> None:
    found = fabric("State : In Progress", "Status : N/A")
    assert found.verdict is Verdict.FAIL
    assert "status" not in found.findings[0].evidence


def test_errors_of_switches_are_told_apart() -> None:
    text = (
        "nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Data {0x0}\n"
        "nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Fatal, Link 28 LTSSM Fault Up\n"
        "NVRM: Xid (PCI:0000:c2:00): 74, x\n"
    )
    assert [(xid.code, xid.of_switch) for xid in parse_xids(text)] == [(20034, True), (74, False)]
