"""What ``kvxfer env`` says RDMA needs, from planted files of ``/sys``, ``/dev`` and ``/proc``."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.cli.main import main
from kvxfer.diagnose.facts import Facts, Gpu, Host
from kvxfer.diagnose.inventory import Sources, facts_of
from kvxfer.diagnose.rdma import Precondition, Process, preconditions, read_process
from kvxfer.errors import NotAvailable
from kvxfer.transport import available_transports
from kvxfer.transport.network_libraries import (
    NetworkLibrary,
    _nixl_at,
    nixl_library,
    ucx_library,
)

PORT = "/sys/class/infiniband/{}/ports/1/"
ACTIVE = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
UCX = NetworkLibrary("1.22.0", "system", has_verbs=True, has_cuda=True)
NIXL = NetworkLibrary("1.5.1", "nixl-cu13", True, True, plugins=("POSIX", "UCX"))
WELL = Process(None, ("uverbs0",), (), UCX, NIXL)


def device(name: str, target: str = "pci0000:15/0000:15:01.0", **port: str) -> Sources:
    """The tree of one device with one port."""
    fields = ACTIVE | port
    return Sources(
        files={PORT.format(name) + key: value for key, value in fields.items()},
        links={f"/sys/class/infiniband/{name}": f"../../devices/{target}/infiniband/{name}"},
    )


def needs(sources: Sources, process: Process = WELL) -> dict[str, Precondition]:
    return {one.name: one for one in preconditions(facts_of(sources), process)}


def test_a_host_that_has_everything_is_told_to_do_nothing() -> None:
    found = needs(device("mlx5_0"))
    assert found["RDMA mlx5_0 port 1"].found == "active, 400 Gbit/s, InfiniBand"
    assert found["/dev/infiniband"].found == "uverbs0"
    assert found["lockable memory"].found == "without limit"
    assert found["UCX"].found == "1.22.0 (system), with verbs, with CUDA"
    assert "plug-ins POSIX, UCX" in found["NIXL"].found
    assert [one.remedy for one in found.values() if one.remedy] == []


@pytest.mark.parametrize(
    ("layer", "text"), [("InfiniBand", "subnet manager"), ("Ethernet", "check cable")]
)
def test_a_port_that_is_down(layer: str, text: str) -> None:
    down = device("mlx5_0", state="2: INIT", link_layer=layer)
    port = needs(down)["RDMA mlx5_0 port 1"]
    assert port.found.startswith("init, 400 Gbit/s")
    assert text in port.remedy
    assert ("subnet" in port.remedy) == (layer == "InfiniBand")


@pytest.mark.parametrize(
    ("name", "target"), [("rxe0", "pci0000:00/net/eth0"), ("siw_lo", "x"), ("my0", "virtual/x")]
)
def test_devices_of_software_are_named_and_count_for_nothing(name: str, target: str) -> None:
    found = needs(device(name, target))
    assert found[f"RDMA {name}"].found == "emulated by the kernel: ignored"
    assert found["RDMA devices"].found == "none"
    assert "use TCP" in found["RDMA devices"].remedy
    assert "/dev/infiniband" not in found


def test_devices_that_programs_cannot_open() -> None:
    hidden = needs(device("mlx5_0"), Process(None, (), (), UCX, NIXL))["/dev/infiniband"]
    assert "docker --device" in hidden.remedy
    closed = Process(None, ("uverbs0", "uverbs1"), ("uverbs1",), UCX, NIXL)
    found = needs(device("mlx5_0"), closed)["/dev/infiniband"]
    assert found.found == "uverbs1 cannot be opened by this user"
    assert "access" in found.remedy


def test_a_limit_of_locked_memory() -> None:
    found = needs(device("mlx5_0"), Process(8 << 20, ("uverbs0",), (), UCX, NIXL))
    assert found["lockable memory"].found == "at most 8 MiB"
    assert "ulimit -l unlimited" in found["lockable memory"].remedy


@pytest.mark.parametrize(
    ("modules", "dmabuf", "found", "text"),
    [
        (("nvidia_peermem",), None, "nvidia_peermem is loaded", ""),
        ((), True, "by dma-buf", ""),
        ((), False, "neither", "modprobe nvidia_peermem"),
        (None, None, "neither", "staged through the host"),
    ],
)
def test_gpu_memory_for_nics(
    modules: tuple[str, ...] | None, dmabuf: bool | None, found: str, text: str
) -> None:
    facts = Facts(gpus=(Gpu(index=0, name="x", dmabuf=dmabuf),), host=Host(modules=modules))
    (need,) = (one for one in preconditions(facts, WELL) if one.name == "GPUDirect RDMA")
    assert found in need.found
    assert text in need.remedy
    assert bool(need.remedy) == bool(text)


def test_without_gpus_nothing_is_said_of_them() -> None:
    assert "GPUDirect RDMA" not in needs(device("mlx5_0"))


def test_libraries_that_lack_a_part() -> None:
    blind = NetworkLibrary("1.22.0", "libucx", has_verbs=False, has_cuda=True)
    bare = NetworkLibrary("1.5.1", "nixl-cu13", True, True, plugins=("POSIX",))
    process = Process(None, ("uverbs0",), (), blind, bare)
    found = needs(device("mlx5_0"), process)
    assert "install the system's UCX" in found["UCX"].remedy
    assert "plug-in UCX is missing" in found["NIXL"].remedy
    assert needs(Sources(), process)["UCX"].remedy == ""  # no device that it could use
    absent = needs(device("mlx5_0"), Process(None, ("uverbs0",), (), None, None))
    assert not {"UCX", "NIXL"} & set(absent)


def test_the_process_is_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    (tmp_path / "dev/infiniband/rdma_cm").touch()
    (tmp_path / "proc/self").mkdir(parents=True)
    status = tmp_path / "proc/self/status"
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    expected = None if limit == resource.RLIM_INFINITY else limit
    status.write_text("Name:\tx\nCapEff:\t0000000000000000\n")
    found = read_process(tmp_path)
    assert found.verbs_devices == ("uverbs0",)
    assert found.memlock_bytes == expected
    status.write_text(f"CapEff:\t{1 << 14:016x}\n")
    assert read_process(tmp_path).memlock_bytes is None


_LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
from kvxfer.diagnose.rdma import read_process
from pathlib import Path
print(read_process(Path("/no/such/root")).memlock_bytes)
"""


def test_the_limit_is_this_process_s_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.stdout.strip() == "65536", done.stderr


def test_nixl_s_files_are_read(tmp_path: Path) -> None:
    for path in ("nixl/libplugin_UCX.so", "nixl/libplugin_GDS.so", "nixl/notes.txt"):
        file = tmp_path / "nixl_cu99.libs" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert _nixl_at("nixl_cu99", tmp_path) == NetworkLibrary(
        "of unknown version", "nixl-cu99", False, False, ("GDS", "UCX")
    )
    modules = tmp_path / "nixl_cu99.libs" / "ucx"
    modules.mkdir()
    (modules / "libuct_ib.so.0.0.0").touch()
    assert _nixl_at("nixl_cu99", tmp_path).has_verbs
    (modules / "libuct_cuda.so.0").touch()
    assert _nixl_at("nixl_cu99", tmp_path).has_cuda


@pytest.mark.parametrize(("name", "look"), [("ucx", ucx_library), ("nixl", nixl_library)])
def test_the_libraries_of_this_machine(name: str, look: object) -> None:
    if available_transports()[name].available:
        found = look()  # type: ignore[operator]
        assert found.version[0].isdecimal()
        assert found.source
        assert (name == "ucx") or "UCX" in found.plugins
    else:
        with pytest.raises(NotAvailable):
            look()  # type: ignore[operator]


def test_env_prints_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "env.json"
    assert main(["env", "--json", str(path)]) == 0
    names = [one["name"] for one in json.loads(path.read_text())["rdma"]]
    shown = capsys.readouterr().out
    assert "lockable memory" in names
    assert all(name in shown for name in names)
    assert main(["env", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())
    assert main(["env", "--json", ""]) == 2
