"""Nodes on which NVML lists no GPU: those that lost their driver, and those that have no GPU."""

from pathlib import Path

import pytest
from rich.console import Console

from kvxfer.cli.diagnose import EXIT_FINDING, EXIT_NOTHING, EXIT_OK, status_of
from kvxfer.diagnose.facts import Gpu
from kvxfer.diagnose.inventory.sources import Nvml, Sources, write_folder
from kvxfer.diagnose.result import CheckResult, DiagnoseReport, Verdict
from kvxfer.diagnose.run import diagnose_folder
from kvxfer.report.diagnose_table import print_diagnosis

DEVICES = "/sys/bus/pci/devices"
GPUS = ("0000:1a:00.0", "0000:2a:00.0")
NO_LIBRARY = "NVML: NVML Shared Library Not Found"
LOADED = {
    "/proc/modules": "nvidia 16384 0 - Live 0x0",
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05",
}
NOT_LOADED = {"/proc/modules": "ext4 16384 0 - Live 0x0"}


def node(
    *,
    gpus: tuple[str, ...] = GPUS,
    bound: str | None = None,
    modules: dict[str, str] = NOT_LOADED,
    reason: str = NO_LIBRARY,
    container: bool = False,
    log: str | None = "",
) -> Sources:
    """A node whose NVML gives ``reason``; ``bound`` is the driver of its GPUs, None = of none."""
    files = {f"{DEVICES}/0000:00:01.0/{name}": "0x8086" for name in ("vendor", "class")} | modules
    links = {f"{DEVICES}/0000:00:01.0/driver": "../../../bus/pci/drivers/pcieport"}
    for gpu in gpus:
        files |= {f"{DEVICES}/{gpu}/vendor": "0x10de", f"{DEVICES}/{gpu}/class": "0x030200"}
        if bound is not None:
            links[f"{DEVICES}/{gpu}/driver"] = f"../../../../bus/pci/drivers/{bound}"
    if container:
        files["/.dockerenv"] = ""
    texts = {} if log is None else {"dmesg.txt": log}
    return Sources(nvml=Nvml(reason=reason), files=files, links=links, texts=texts)


def judged(sources: Sources, folder: Path) -> tuple[DiagnoseReport, dict[str, CheckResult]]:
    """By way of a folder, as a capture goes."""
    write_folder(sources, folder)
    report = diagnose_folder(folder)
    return report, {one.check: one for one in report.checks}


def printed(report: DiagnoseReport) -> str:
    console = Console(width=160, force_terminal=False)
    with console.capture() as captured:
        print_diagnosis(report, console)
    return captured.get()


@pytest.mark.parametrize(
    ("sources", "evidence", "cause", "remedy"),
    [
        (node(), "no NVIDIA driver; bound to none", "is not loaded", "modprobe nvidia"),
        (
            node(bound="nouveau"),
            "no NVIDIA driver; bound to nouveau",
            "another driver took",
            "keep that driver from loading",
        ),
        (
            node(bound="vfio-pci"),
            "bound to vfio-pci",
            "set apart for virtual machines",
            "inside the virtual machine",
        ),
        (
            node(modules=LOADED),
            f"{NO_LIBRARY}; driver 580.95.05 is loaded; bound to none",
            "did not take the GPU:",
            "NVRM",
        ),
        (
            node(modules=LOADED, bound="nvidia", container=True),
            "driver 580.95.05 is loaded",
            "container was started without",
            "--gpus all",
        ),
        (
            node(modules=LOADED, bound="nvidia"),
            NO_LIBRARY,
            "libraries are missing",
            "run nvidia-smi",
        ),
    ],
)
def test_gpus_without_a_driver_fail(
    sources: Sources, evidence: str, cause: str, remedy: str, tmp_path: Path
) -> None:
    report, checks = judged(sources, tmp_path)
    (finding,) = checks["cuda-start"].findings
    assert finding.verdict is Verdict.FAIL
    assert "2 GPUs on the PCI bus (0000:1a:00.0, 0000:2a:00.0)" in finding.evidence
    assert evidence in finding.evidence
    assert cause in finding.cause
    assert remedy in finding.remedy
    assert status_of(report) == EXIT_FINDING
    assert "2 GPUs on the PCI bus, none of them usable" in printed(report)
    assert sum(bool(one.findings) for one in checks.values()) == 1  # one fault, told once


@pytest.mark.parametrize(
    ("bound", "verdict", "cause"),
    [
        ("vfio-pci", Verdict.WARN, "set apart for virtual machines"),
        ("nvgrace-gpu-vfio-pci", Verdict.WARN, "set apart for virtual machines"),
        ("nouveau", Verdict.FAIL, "another driver took the GPU"),
        ("", Verdict.FAIL, "the driver is loaded and did not take the GPU"),
        ("nvidia", Verdict.FAIL, "it failed to start or fell off the bus"),
        (None, Verdict.FAIL, "it failed to start or fell off the bus"),
    ],
)
@pytest.mark.parametrize("expected", [None, 2])
def test_why_one_gpu_is_not_listed(
    bound: str | None, verdict: Verdict, cause: str, expected: int | None, tmp_path: Path
) -> None:
    """By what it is bound to, also where the operator said how many there should be."""
    sources = node(modules=LOADED, bound=None if bound is None else "nvidia")
    if bound is None:
        sources.links = {}
    elif bound:
        sources.links[f"{DEVICES}/{GPUS[1]}/driver"] = f"../../../../bus/pci/drivers/{bound}"
    else:
        del sources.links[f"{DEVICES}/{GPUS[1]}/driver"]
    sources.nvml = Nvml(gpus=(Gpu(index=0, name="A", pci=GPUS[0]),), driver="580.95.05")
    write_folder(sources, tmp_path / "node")
    report = diagnose_folder(tmp_path / "node", expect_gpus=expected)
    check = next(one for one in report.checks if one.check == "gpu-count")
    found = {one.where: one for one in check.findings}
    assert len(found) == (1 if expected is None else 2)
    finding = found[f"GPU at {GPUS[1]}"]
    assert finding.verdict is verdict
    assert cause in finding.cause
    assert (f"bound to {bound or 'none'}" in finding.evidence) is (bound is not None)


def test_a_virtual_function_is_no_gpu_of_the_host(tmp_path: Path) -> None:
    """A host of vGPUs has many on the bus, which its driver hands to virtual machines."""
    function = "0000:1a:00.4"
    sources = node(gpus=(*GPUS, function), modules=LOADED, bound="nvidia")
    sources.links[f"{DEVICES}/{function}/physfn"] = f"../{GPUS[0]}"
    gpus = tuple(Gpu(index=index, name="A", pci=pci) for index, pci in enumerate(GPUS))
    sources.nvml = Nvml(gpus=gpus, driver="580.95.05")
    _, checks = judged(sources, tmp_path)
    assert checks["gpu-count"].evidence == "2 GPUs on the bus, all known to the driver"


def test_gpus_that_nvml_counts_as_none_fail(tmp_path: Path) -> None:
    sources = node(modules=LOADED, bound="nvidia")
    sources.nvml = Nvml(gpus=(), driver="580.95.05")
    _, checks = judged(sources, tmp_path)
    assert "none to use: NVML lists no GPU" in checks["cuda-start"].findings[0].evidence


def test_no_gpu_at_all_is_nothing_to_test(tmp_path: Path) -> None:
    """Not even the log's silence is of GPUs."""
    report, checks = judged(node(gpus=()), tmp_path)
    assert {one.verdict for one in checks.values()} == {Verdict.NOT_APPLICABLE}
    assert checks["kernel-log"].evidence == checks["gpu-count"].evidence == "no GPU here"
    assert "no GPU here, 0 RDMA devices: N/A" in printed(report)
    assert status_of(report) == EXIT_NOTHING
    assert status_of(report, is_capture=True) == EXIT_OK


@pytest.mark.parametrize(
    ("expected", "verdict"), [(1, Verdict.FAIL), (None, Verdict.NOT_APPLICABLE)]
)
def test_gpus_that_left_no_trace_are_missed_where_they_were_expected(
    expected: int | None, verdict: Verdict, tmp_path: Path
) -> None:
    write_folder(node(gpus=()), tmp_path / "node")
    report = diagnose_folder(tmp_path / "node", expect_gpus=expected)
    (check,) = (one for one in report.checks if one.check == "gpu-count")
    assert check.verdict is verdict
    if expected:
        assert (
            "0 GPUs listed by the driver, 0 on the PCI bus; 1 expected"
            in check.findings[0].evidence
        )


def test_a_driver_without_any_gpu_warns(tmp_path: Path) -> None:
    """Its module does not load where there is nothing for it: the GPUs were there."""
    report, checks = judged(node(gpus=(), modules=LOADED), tmp_path)
    (finding,) = checks["cuda-start"].findings
    assert finding.verdict is Verdict.WARN
    assert "driver 580.95.05 is loaded, and no GPU is on the PCI bus" in finding.evidence
    assert status_of(report) == EXIT_FINDING


def test_a_log_of_gpus_that_are_gone_is_judged(tmp_path: Path) -> None:
    log = "NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.\n"
    _, checks = judged(node(gpus=(), log=log), tmp_path)
    assert checks["kernel-log"].verdict is Verdict.FAIL


def test_a_capture_by_hand_need_not_have_asked_nvml(tmp_path: Path) -> None:
    """Unknown is never a fault."""
    sources = node(modules=LOADED)
    sources.nvml = None
    report, _ = judged(sources, tmp_path)
    assert not report.has_finding
    assert "2 GPUs on the PCI bus, no more known of them" in printed(report)


def test_reasons_are_printed_once(tmp_path: Path) -> None:
    report, checks = judged(node(gpus=()), tmp_path)
    text = printed(report)
    assert text.count("no GPU here (") == 1
    assert all(name in text for name in checks)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"/proc/self/status": "Cpus_allowed_list:\t0-2,8"}, "no GPU known of, 4 CPUs, 0 RDMA"),
        ({"/sys/devices/system/node/node0/cpulist": "0-47"}, "no GPU known of, 48 CPUs, 0 RDMA"),
        ({"/proc/sys/kernel/osrelease": "6.8"}, "no GPU known of, 0 RDMA devices"),
    ],
)
def test_the_cpus_of_a_capture_are_counted(
    files: dict[str, str], words: str, tmp_path: Path
) -> None:
    report, _ = judged(Sources(files=files), tmp_path)
    assert words in printed(report)
