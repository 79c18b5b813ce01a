"""Captures that no node made: damaged, endless, absurd, or written to deceive their readers."""

import io
import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from captures import CASES, write_capture
from rich.console import Console

from kvxfer.diagnose.compare import read_report
from kvxfer.diagnose.facts import Gpu
from kvxfer.diagnose.inventory.kernel_log import parse_xids
from kvxfer.diagnose.inventory.sources import Nvml, Sources, parse_sysfs, write_folder
from kvxfer.diagnose.inventory.system import parse_cpulist
from kvxfer.diagnose.result import DiagnoseReport
from kvxfer.diagnose.run import diagnose_folder
from kvxfer.errors import InvalidUsage, KvxferError
from kvxfer.report.diagnose_html import to_html
from kvxfer.report.diagnose_prometheus import to_prometheus
from kvxfer.report.diagnose_table import print_diagnosis

MANY_MIB = 17 << 20


def shown(report: DiagnoseReport) -> str:
    """The report in every form; what the terminal gets."""
    console = Console(file=io.StringIO(), width=160)
    print_diagnosis(report, console)
    to_html(report)
    to_prometheus(report)
    msgspec.json.decode(msgspec.json.encode(report), type=DiagnoseReport)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MANY_MIB)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (fifo, "is no regular file"),
        (endless, "is no regular file"),
        (folder, "cannot read|is no regular file"),
        (large, "has more than 16 MiB"),
    ],
)
@pytest.mark.parametrize("name", ["topo.txt", "nvml.json", "sysfs.txt", "perftest-mlx5_0-gpu.txt"])
def test_a_file_that_is_none_is_refused(
    make: Callable[[Path], None], words: str, name: str, tmp_path: Path
) -> None:
    make(tmp_path / name)
    with pytest.raises(InvalidUsage, match=words):
        diagnose_folder(tmp_path)
    with pytest.raises(InvalidUsage, match=words):
        read_report(str(tmp_path / name))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "topo.txt").write_text("x")
    (tmp_path / "topo.txt").chmod(0)
    with pytest.raises(InvalidUsage, match=r"cannot read .*topo\.txt.*Permission denied"):
        diagnose_folder(tmp_path)


def test_a_name_that_is_no_path_is_refused() -> None:
    with pytest.raises(InvalidUsage):
        diagnose_folder(Path("a" * 5000))


@pytest.mark.parametrize("name", ["nvml.json", "acs.json"])
@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"x":' * 100_000, "", "null", "\x00", '{"gpus": 1e999}', '"\\ud800"'],
)
def test_json_of_no_capture_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidUsage, match="cannot be read"):
        diagnose_folder(tmp_path)
    with pytest.raises(InvalidUsage, match="is no report"):
        read_report(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p2p.txt", " GPU0 GPU9999\n GPU0 X OK\n GPU9999 OK X\n"),
        ("topo.txt", " ".join(f"GPU{index}" for index in range(5000)) + "\nGPU0 X\n"),
        ("query.txt", "GPU 00000000:1A:00.0\n" * 100),
        ("sysfs.txt", "".join(f"/sys/class/infiniband/m{n}/x:1\n" for n in range(2_000))),
        (
            "sysfs.txt",
            "".join(f"/sys/devices/system/node/node{n}/cpulist:0-9999\n" for n in range(9999)),
        ),
        ("query.txt", "GPU 00000000:1A:00.0\n    Product Name : H100\n" * 2),
        ("nvml.json", '{"gpus": [{"index": 3, "name": "A"}, {"index": 3, "name": "A"}]}'),
    ],
)
def test_more_devices_than_any_node_has_are_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidUsage, match="the capture tells of"):
        diagnose_folder(tmp_path)


NINES = "9" * 5000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nvlink.txt", f"GPU 0: A (UUID: x)\n Link 0: 1.2.3 GB/s\n Link 1: {NINES} GB/s\n"),
        ("nvlink.txt", f"GPU {NINES}: A (UUID: x)\n Link {NINES}: 1 GB/s\n"),
        ("topo.txt", f"GPU0 GPU1 CPU Affinity\nGPU0 X NV{NINES} 0 {NINES}\n"),
        ("topo.txt", f"GPU0 GPU{NINES}\nGPU0 X NV1\n"),
        ("query.txt", f"GPU 00000000:1A:00.0\n    Fabric\n        CliqueId : {NINES}\n"),
        ("dmesg.txt", f"NVRM: Xid (PCI:{NINES}): {NINES}, x\nSXid (PCI:0): {NINES}, Fatal, x\n"),
        ("perftest-a-gpu.txt", f"#bytes #iterations BW peak[MB/sec]\n {NINES} 1 1.1.1 ...\n"),
        ("cuda.txt", f"error {NINES}"),
        ("acs.json", '{"x": 99999999999999999999}'),
        ("sysfs.txt", f"/sys/bus/pci/devices/0000:1a:00.0/numa_node:{NINES[:4000]}\n"),
        ("sysfs.txt", f"/sys/devices/system/node/node{NINES}/cpulist:0-{NINES}\n"),
        ("sysfs.txt", f"/sys/class/infiniband/m/ports/{NINES}/rate:{NINES} Gb/sec\n"),
        ("sysfs.txt", "/" + "a/" * 500_000 + "\n"),
    ],
)
def test_absurd_numbers_are_unknown_or_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    try:
        report = diagnose_folder(tmp_path)
    except KvxferError:
        return
    shown(report)


@pytest.mark.parametrize("line", ["/a" * 3_000_000, "/" + "a/" * 3_000_000 + "x:1"])
def test_a_line_without_an_end_is_no_path(line: str) -> None:
    """It ends within the time of a test: neither the pattern nor the folders take its square."""
    files, links = parse_sysfs(f"{line}\n/proc/x:1\n")
    assert (files, links) == ({"/proc/x": "1"}, {})


def test_a_log_of_nothing_but_errors_has_an_end() -> None:
    log = "".join(f"NVRM: Xid (PCI:0000:1a:00): {code}, x\n" for code in range(200_000))
    assert [xid.code for xid in parse_xids(log)] == [*range(1_000)]


def test_lists_of_cpus_have_an_end() -> None:
    assert len(parse_cpulist("0-9999," * 50)) == 10_000
    assert parse_cpulist("0-99999999") == ()


DECEITS = (
    "\x1b]0;owned\x07",
    "\x1b[2J",
    "[bold]x[/nothing]",
    "<script>x</script>",
    "\u202e",
)


@pytest.mark.parametrize("deceit", DECEITS)
def test_text_of_a_capture_is_text(deceit: str, tmp_path: Path) -> None:
    """Neither a terminal nor a browser obeys it, by whichever way it came."""
    gpu = Gpu(index=0, name=deceit, pci=deceit, mig=True, slowdown=deceit)
    texts = {
        "dmesg.txt": f"NVRM: Xid (PCI:0000:1a:00): 79, {deceit}\n",
        "cuda.txt": f"error 802 {deceit}",
        "perftest-[red]-host.txt": "#bytes #iterations BW peak[MB/sec]\n 9 9 1.0 1.0\n",
    }
    write_folder(Sources(nvml=Nvml(gpus=(gpu,), cuda_reason=deceit), texts=texts), tmp_path)
    report = diagnose_folder(tmp_path)
    text = shown(report)
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "<script>" not in to_html(report)
    if deceit.startswith("["):
        assert deceit in text


def damaged(text: bytes, random_: random.Random) -> bytes:
    """A few bytes of it changed, a piece lost, or one doubled."""
    for _ in range(random_.randint(1, 4)):
        at, end = sorted(random_.randrange(len(text) + 1) for _ in range(2))
        kind = random_.randrange(4)
        if kind == 0:
            text = text[:at] + bytes(random_.randrange(256) for _ in range(8)) + text[at + 8 :]
        elif kind == 1:
            text = text[:at] + text[min(end, at + 400) :]
        elif kind == 2:
            text = text[:end] + text[at : min(end, at + 400)] + text[end:]
        else:
            text = text.replace(bytes([random_.choice(b" \t\n:0123456789XN")]), b"\xff", 3)
    return text


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_capture_is_judged_or_refused(seed: int, tmp_path: Path) -> None:
    random_ = random.Random(seed)
    capture = write_capture(random_.choice(CASES), tmp_path / "capture")
    for path in capture.iterdir():
        path.write_bytes(damaged(path.read_bytes(), random_))
    try:
        report = diagnose_folder(capture)
    except InvalidUsage:
        return
    shown(report)
    (tmp_path / "old.json").write_bytes(
        damaged(json.dumps(msgspec.to_builtins(report)).encode(), random_)
    )
    with suppress(InvalidUsage):
        shown(diagnose_folder(capture, older=read_report(str(tmp_path / "old.json"))))
