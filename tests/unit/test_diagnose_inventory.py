"""What ``kvxfer diagnose`` reads of a machine, and that a capture of it says the same."""

import struct
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pynvml
import pytest
from captures import write_capture
from diagnose_nodes import switched_node

from kvxfer.diagnose.facts import Gpu, NvLink, format_pci
from kvxfer.diagnose.inventory import Nvml, Sources, facts_of, read_folder, read_live, write_folder
from kvxfer.diagnose.inventory import live as live_module
from kvxfer.diagnose.inventory import nvml as nvml_module
from kvxfer.diagnose.inventory.acs import acs_control, parse_lspci, read_acs
from kvxfer.diagnose.inventory.kernel_log import parse_xids
from kvxfer.diagnose.inventory.nics import path_between
from kvxfer.diagnose.inventory.perftest_text import nic_figures, refused_errno
from kvxfer.diagnose.inventory.smi_text import parse_nvlink
from kvxfer.diagnose.inventory.sources import parse_sysfs
from kvxfer.diagnose.inventory.system import parse_cpulist
from kvxfer.diagnose.inventory.topo_text import parse_p2p, parse_topo
from kvxfer.errors import InvalidUsage


def test_this_machine_can_be_read_and_captured(tmp_path: Path) -> None:
    sources = read_live()
    facts = facts_of(sources)
    assert facts.host.kernel
    assert facts.host.num_cpus
    write_folder(sources, tmp_path)
    again = facts_of(read_folder(tmp_path))
    assert again.gpus == facts.gpus
    assert again.nics == facts.nics
    for name in (
        "kernel",
        "cpu",
        "num_cpus",
        "numa_nodes",
        "driver",
        "gpu_drivers",
        "nvml_reason",
        "iommu",
        "acs_ports",
        "hypervisor",
        "pid_namespace",
    ):
        assert getattr(again.host, name) == getattr(facts.host, name), name


def test_a_capture_replaces_all_of_an_older_one(tmp_path: Path) -> None:
    write_folder(Sources(acs={"0000:00:01.0": 1}, texts={"dmesg.txt": "old"}), tmp_path)
    write_folder(Sources(files={"/proc/modules": "ext4"}), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["sysfs.txt"]


@pytest.mark.parametrize("name", ["topo.txt", "nvml.json.bak", "notes", "sysfs.txt/x"])
def test_a_capture_replaces_nothing_else(name: str, tmp_path: Path) -> None:
    """A text that someone captured by hand neither; nothing is written then."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(InvalidUsage, match="which --capture did not write; name a folder that is"):
        write_folder(Sources(texts={"dmesg.txt": "x"}), tmp_path)
    assert path.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_capture_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    folder = tmp_path / "capture"
    folder.mkdir()
    (folder / "dmesg.txt").symlink_to(tmp_path / "precious")
    with pytest.raises(InvalidUsage, match=r"holds 'dmesg\.txt'"):
        write_folder(Sources(texts={"dmesg.txt": "x"}), folder)
    assert (tmp_path / "precious").read_text() == "mine"
    with pytest.raises(InvalidUsage, match="cannot write the capture"):
        write_folder(Sources(), tmp_path / "precious")


def test_a_capture_of_gpus_holds_all_that_nvml_said(tmp_path: Path) -> None:
    node = switched_node(8)
    nvml = Nvml(gpus=node.gpus, pairs=node.pairs, driver="580.95.05", cuda_status=0)
    write_folder(Sources(nvml=nvml, acs={"0000:16:00.0": 0x1D, "0000:17:00.0": 0}), tmp_path)
    facts = facts_of(read_folder(tmp_path))
    assert (facts.gpus, facts.pairs) == (node.gpus, node.pairs)
    assert facts.host.driver == "580.95.05"
    assert facts.host.acs_ports == ("0000:16:00.0",)
    assert facts.sources["GPUs"] == "NVML"


def test_nvml_stands_above_text(tmp_path: Path) -> None:
    folder = write_capture("hgx_h100", tmp_path / "capture")
    write_folder(Sources(nvml=Nvml(gpus=switched_node(2).gpus)), tmp_path / "nvml")
    (folder / "nvml.json").write_text((tmp_path / "nvml" / "nvml.json").read_text())
    assert len(facts_of(read_folder(folder)).gpus or ()) == 2


def test_a_planted_root_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "read_nvml", lambda: None)
    for path, text in (
        ("proc/sys/kernel/osrelease", "6.8.0\n"),
        ("proc/5/comm", "nv-fabricmanage\n"),
        ("proc/6/comm", "secret-program\n"),
        ("sys/class/infiniband/siw0/node_type", "4: RNIC\n"),
        ("sys/bus/pci/devices/0000:1a:00.0/vendor", "0x10de\n"),
        ("sys/bus/pci/devices/0000:1a:00.0/class", "0x030200\n"),
        ("sys/bus/pci/devices/0000:1a:00.4/vendor", "0x10de\n"),
        ("sys/bus/pci/devices/0000:1a:00.4/class", "0x030200\n"),
        ("sys/devices/system/node/node1/cpulist", "4-6,9\n"),
        ("proc/self/status", "Name:\tsecret-program\nCpus_allowed_list:\t4,6\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "sys/bus/pci/drivers/nouveau").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:1a:00.0/driver").symlink_to("../../drivers/nouveau")
    (tmp_path / "sys/bus/pci/devices/0000:1a:00.4/physfn").symlink_to("../0000:1a:00.0")
    sources = read_live(tmp_path)
    write_folder(sources, tmp_path / "capture")
    assert facts_of(read_folder(tmp_path / "capture")).host.gpu_pcis == ("0000:1a:00.0",)
    assert not any("secret-program" in text for text in sources.files.values())
    assert sources.files["/proc/self/status"] == "Cpus_allowed_list:\t4,6"
    host = facts_of(sources).host
    assert (host.kernel, host.fabric_manager_running) == ("6.8.0", True)
    assert host.gpu_pcis == ("0000:1a:00.0",)
    assert host.gpu_drivers == {"0000:1a:00.0": "nouveau"}
    assert host.numa_nodes[0].cpus == (4, 5, 6, 9)
    assert facts_of(sources).nics[0].software


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00000000:1A:00.0", "0000:1a:00.0"),
        ("0001:9b:00.1", "0001:9b:00.1"),
        ("1a:00.0", "0000:1a:00.0"),
        ("0000:3b:00", "0000:3b:00.0"),
        (" Nothing ", "nothing"),
    ],
)
def test_spellings_of_a_pci_address(text: str, expected: str) -> None:
    assert format_pci(text) == expected


def acs_space(*capabilities: tuple[int, int, int]) -> bytes:
    """Configuration space with extended capabilities (offset, id, next offset)."""
    space = bytearray(4096)
    for offset, capability, following in capabilities:
        struct.pack_into("<I", space, offset, capability | 1 << 16 | following << 20)
        struct.pack_into("<H", space, offset + 6, 0x001D)
    return bytes(space)


def test_the_acs_register_is_found_in_configuration_space() -> None:
    assert acs_control(acs_space((0x100, 1, 0x148), (0x148, 0x000D, 0))) == 0x1D
    assert acs_control(acs_space((0x100, 1, 0))) is None
    assert acs_control(acs_space((0x100, 1, 0x148), (0x148, 2, 0x100))) is None  # a loop
    assert acs_control(acs_space((0x100, 1, 0xFFC))) is None  # beyond the end
    assert acs_control(bytes(256)) is None


def test_bridges_without_root_are_unknown(tmp_path: Path) -> None:
    bridge = tmp_path / "0000:16:00.0"
    bridge.mkdir()
    (bridge / "class").write_text("0x060400\n")
    (bridge / "config").write_bytes(bytes(64))
    assert read_acs(tmp_path) is None
    (bridge / "config").write_bytes(acs_space((0x100, 0x000D, 0)))
    assert read_acs(tmp_path) == {"0000:16:00.0": 0x1D}
    assert parse_lspci("16:00.0 PCI bridge: x\n\tCapabilities: <access denied>\n") is None


def test_paths_between_devices() -> None:
    root = "../../devices/pci0000:15/0000:15:01.0"
    assert path_between(f"{root}/a/b/gpu", f"{root}/a/c/nic") == "PIX"
    assert path_between(f"{root}/a/b/x/y/gpu", f"{root}/a/c/nic") == "PXB"
    assert path_between(f"{root}/gpu", "../../devices/pci0000:15/0000:15:02.0/nic") == "PHB"
    assert path_between(f"{root}/gpu", "../../devices/pci0000:40/0000:40:01.0/nic") == ""
    assert path_between("", f"{root}/nic") == ""


def test_lines_of_sysfs_with_colons() -> None:
    files, links = parse_sysfs(
        "/sys/bus/pci/devices/0000:1a:00.0/vendor:0x10de\n"
        "/sys/class/infiniband/mlx5_0/ports/1/state:4: ACTIVE\n"
        "/proc/cpuinfo:model name\t: X: Y\n/proc/cpuinfo:flags\t: a\n"
        "/sys/bus/pci/devices/0000:1a:00.0 -> ../../../devices/pci0000:15/0000:1a:00.0\n"
        "no line of any file\n"
    )
    assert files["/sys/bus/pci/devices/0000:1a:00.0/vendor"] == "0x10de"
    assert files["/sys/class/infiniband/mlx5_0/ports/1/state"] == "4: ACTIVE"
    assert files["/proc/cpuinfo"] == "model name\t: X: Y\nflags\t: a"
    assert len(links) == 1


def test_lists_of_cpus() -> None:
    assert parse_cpulist("0-2,7") == (0, 1, 2, 7)
    assert parse_cpulist("") == ()


def test_xids_count_once_a_gpu() -> None:
    text = (
        "NVRM: Xid (PCI:0000:3b:00): 74, pid=1, NVLink: fatal error detected on link 6(0x1)\n"
        "NVRM: Xid (PCI:0000:3b:00): 74, pid=1, again\nNVRM: Xid (0000:86:00): 79\n"
    )
    assert [(xid.code, xid.pci) for xid in parse_xids(text)] == [
        (74, "0000:3b:00.0"),
        (79, "0000:86:00.0"),
    ]


def test_a_tool_that_failed_is_no_topology() -> None:
    assert parse_topo("Failed to open device\n").num_gpus == 0
    assert parse_p2p("nothing") == {}
    assert parse_nvlink("Link 0: 25 GB/s\n") == []  # of no GPU


def test_a_numa_node_that_is_not_told_is_unknown() -> None:
    text = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-3\tN/A\t\tN/A\n"
    assert parse_topo(text).numa == {"GPU0": None}


def test_perftest_s_text() -> None:
    row = " 65536      5000             380.10             371.20    0.75\n"
    head = "#bytes     #iterations    BW peak[{}/sec]    BW average[{}/sec]   MsgRate[Mpps]\n"
    texts = {
        "perftest-mlx5_0-host.txt": head.format("Gb", "Gb") + " 2  5000  1.0  0.9  1.0\n" + row,
        "perftest-mlx5_1-gpu.txt": head.format("MB", "MB") + row,
        "perftest-mlx5_2-gpu.txt": "nothing",
    }
    rates = {one.src: one.gb_per_s for one in nic_figures(texts)}
    assert rates == {
        "mlx5_0": pytest.approx(371.2 / 8),
        "mlx5_1": pytest.approx(371.2 * 1.048576e-3),
    }
    assert refused_errno(texts) is None
    refused = {"perftest-mlx5_0-gpu.txt": "Couldn't allocate MR\nOperation not supported"}
    assert refused_errno(refused) == 95


class FakeNvml:
    """Just enough of NVML for one GPU with a switch; what is not here raises as an old driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **calls: object) -> None:
        for name in dir(pynvml):
            value = getattr(pynvml, name)
            if name.startswith("nvml") and callable(value) and not isinstance(value, type):
                monkeypatch.setattr(pynvml, name, calls.get(name, self.missing))

    def missing(self, *_: object) -> object:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def test_an_old_driver_leaves_what_it_lacks_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def active(handle: object, link: int) -> int:
        if link > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return 1 - link

    FakeNvml(
        monkeypatch,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=b"00000000:1A:00.0"),
        nvmlDeviceGetNvLinkState=active,
        nvmlDeviceGetMigMode=lambda handle: [1, 1],
        nvmlDeviceGetCurrentClocksEventReasons=lambda handle: 0x84,
    )
    monkeypatch.setattr(nvml_module, "_read_cuda", lambda: (802, "not ready", {}))
    found = nvml_module.read_nvml()
    assert (found.cuda_status, found.cuda_reason, found.driver) == (802, "not ready", "")
    (gpu,) = found.gpus or ()
    assert gpu.pci == "0000:1a:00.0"
    assert gpu.links == (NvLink(index=0, active=True), NvLink(index=1, active=False))
    assert (gpu.mig, gpu.slowdown) == (True, "power brake")
    assert (gpu.fabric, gpu.row_remap_failed, gpu.memory_bytes) == (None, None, None)


# The bits of a fabric that is well in all it tells: "no" or "none", and bandwidth not degraded.
WELL = 2 | 2 << 2 | 2 << 4 | 2 << 6 | 1 << 8


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0, ""),
        (WELL, ""),
        (WELL ^ 3, "degraded in bandwidth"),
        (WELL ^ 3 << 2, "recovering routes"),
        (WELL ^ 3 << 4, "unhealthy in its routes"),
        (WELL ^ 3 << 6, "recovering from access timeouts"),
        (WELL | 5 << 8, "configured incorrectly (insufficient nvlinks)"),
        (WELL | 15 << 8, "configured incorrectly (code 15)"),
    ],
)
@pytest.mark.parametrize("newest", [2, 3])
def test_the_health_that_nvml_tells_of_a_fabric(
    newest: int, mask: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a driver that knows version 3 of the answer, or 2 alone."""

    def tell(handle: object, pointer: object) -> int:
        info = pointer._obj  # type: ignore[attr-defined]
        if info.version >> 24 > newest:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        info.state, info.healthMask = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, mask
        if newest == 3:
            info.healthSummary = 1  # healthy, it says
        return pynvml.NVML_SUCCESS  # type: ignore[no-any-return]

    FakeNvml(monkeypatch, nvmlDeviceGetGpuFabricInfoV=tell)
    found = nvml_module._fabric(0)
    assert found is not None
    assert (found.state, found.health) == (
        "completed",
        words or ("healthy" if newest == 3 else ""),
    )


def test_rows_that_wait_for_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(
        monkeypatch,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=b"00000000:1A:00.0"),
        nvmlDeviceGetRemappedRows=lambda handle: (0, 1, 1, 0),
    )
    gpu = nvml_module._gpu(0, 0, {}, {})
    assert (gpu.row_remap_failed, gpu.row_remap_pending) == (False, True)


def test_a_p2p_status_that_nvml_does_not_know_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch, nvmlDeviceGetP2PStatus=lambda *_: pynvml.NVML_P2P_STATUS_UNKNOWN)
    gpu = Gpu(index=0, name="")
    pair = nvml_module._pair(gpu, gpu, 0, 0)
    assert (pair.read, pair.write, pair.nvlink) == (None, None, None)


@pytest.mark.parametrize(
    ("remote", "status", "expected"),
    [
        ("switch", "ok", 18),
        ("unknown", "ok", 18),
        ("switch", "not supported", 18),
        ("unknown", "not supported", 0),
        ("0000:1b:00.0", "ok", 3),
    ],
)
def test_links_that_join_two_gpus(remote: str, status: str, expected: int) -> None:
    """Those to the peer; through switches also where the status contradicts it."""
    links = tuple(
        NvLink(index=index, active=True, remote="gpu", remote_pci=remote if index < 3 else "x")
        if ":" in remote
        else NvLink(index=index, active=True, remote=remote)
        for index in range(18)
    )
    one, other = (msgspec.structs.replace(gpu, links=links) for gpu in switched_node(2).gpus or ())
    assert nvml_module._num_links(one, other, status) == expected


def test_a_machine_without_nvml_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch)
    found = nvml_module.read_nvml()
    assert found.gpus is None
    assert found.reason.startswith("NVML: ")
