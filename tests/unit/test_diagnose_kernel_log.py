"""Xids and SXids of the kernel's log: of which device and instance, how bad, on which links."""

from pathlib import Path

import pytest
from captures import write_capture

from kvxfer.diagnose.inventory.kernel_log import parse_xids
from kvxfer.diagnose.result import CheckResult, Verdict
from kvxfer.diagnose.run import diagnose_folder

OF_GPU = "NVRM: Xid (PCI:0000:1a:00): "
OF_SWITCH = "nvidia-nvswitch3: SXid (PCI:0000:04:00.0): "


def judged(folder: Path, *lines: str) -> CheckResult:
    capture = write_capture("hgx_h100", folder)
    (capture / "dmesg.txt").write_text("".join(f"{line}\n" for line in lines))
    return next(one for one in diagnose_folder(capture).checks if one.check == "kernel-log")


@pytest.mark.parametrize(
    ("device", "where"),
    [
        ("PCI:0000:1a:00 GPU-I:05", "GPU 0 (0000:1a:00.0), GPU-I:05"),
        ("PCI:0000:1a:00 GPU-I:05 GPU-CI:00", "GPU 0 (0000:1a:00.0), GPU-I:05 GPU-CI:00"),
        ("0000:1a:00", "GPU 0 (0000:1a:00.0)"),
    ],
)
def test_an_error_of_an_instance_is_seen(device: str, where: str, tmp_path: Path) -> None:
    found = judged(tmp_path, f"NVRM: Xid ({device}): 94, pid=7, Contained")
    assert found.verdict is Verdict.FAIL
    assert [one.where for one in found.findings] == [where]


def test_instances_are_told_apart() -> None:
    lines = [f"NVRM: Xid (PCI:0000:1a:00 GPU-I:0{one}): 94, x" for one in (1, 2, 1)]
    assert [xid.instance for xid in parse_xids("\n".join(lines))] == ["GPU-I:01", "GPU-I:02"]


@pytest.mark.parametrize(
    ("lines", "places"),
    [
        (
            (
                f"{OF_GPU}149, NETIR_LINK_EVT Nonfatal XC0 i0 Link 08 (0x1)",
                f"{OF_GPU}149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x1)",
            ),
            [("FAIL", "GPU 0 (0000:1a:00.0), link 8"), ("WARN", "GPU 0 (0000:1a:00.0), link 8")],
        ),
        (
            (
                f"{OF_SWITCH}22013, Non-fatal, Link 44 x",
                f"{OF_SWITCH}22013, Fatal, Link 45 y",
            ),
            [
                ("FAIL", "NVSwitch at 0000:04:00.0, link 45"),
                ("WARN", "NVSwitch at 0000:04:00.0, link 44"),
            ],
        ),
        (
            (
                f"{OF_GPU}74, pid=1, NVLink: fatal error detected on link 3(0x1)",
                f"{OF_GPU}74, pid=1, NVLink: fatal error detected on link 9(0x1)",
                f"{OF_GPU}74, pid=2, NVLink: fatal error detected on link 3(0x1)",
            ),
            [("FAIL", "GPU 0 (0000:1a:00.0), link 3, link 9")],
        ),
        (
            (f"{OF_GPU}149, NETIR Fatal XC0 i0 Link -1 (0x1)",),
            [("FAIL", "GPU 0 (0000:1a:00.0)")],
        ),
    ],
)
def test_the_worst_of_a_code_and_all_its_links_are_told(
    lines: tuple[str, ...], places: list[tuple[str, str]], tmp_path: Path
) -> None:
    found = judged(tmp_path, *lines)
    assert [(one.verdict.value, one.where) for one in found.findings] == places


def test_a_log_that_repeats_an_error_on_all_links_has_an_end() -> None:
    log = "".join(f"{OF_GPU}74, x on link {line % 1000}\n" for line in range(100_000))
    (xid,) = parse_xids(log)
    assert xid.links == tuple(range(1000))
