"""Which way `nixl` takes between the memory of two GPUs, and what it says of detours."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvxfer import _core
from kvxfer.transport.nixl import reach as module
from kvxfer.transport.nixl.reach import Side, reach

HOST = Side("", rdma=False, pid_namespace=1)
NEAR = Side("GPU-0", rdma=True, pid_namespace=1)
FAR = Side("GPU-1", rdma=True, pid_namespace=1)


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "device_count", lambda: 2)
    monkeypatch.setattr(_core, "device_info", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
    monkeypatch.setattr(_core, "can_access_peer", lambda near, far: True)
    monkeypatch.setattr(module, "gpu_path", lambda *_: SimpleNamespace(limit_gb_per_s=450.0))


def test_host_memory_needs_nothing() -> None:
    found = reach(HOST, HOST, one_host=True, device=-1)
    assert not found.in_device
    assert (found.name, found.problem) == ("", "")


def test_gpus_of_one_host_map_each_other() -> None:
    found = reach(NEAR, FAR, one_host=True, device=0)
    assert found.in_device
    assert (found.name, found.problem, found.limit_gb_per_s) == ("cuda_ipc", "", 450.0)


def test_gpus_of_two_hosts_take_rdma_where_both_have_it() -> None:
    found = reach(NEAR, FAR, one_host=False, device=0)
    assert found.in_device
    assert found.name == "GPUDirect RDMA"


@pytest.mark.parametrize(
    ("near", "far", "one_host", "problem"),
    [
        (NEAR, FAR._replace(pid_namespace=2), True, "different pid namespaces"),
        (NEAR, FAR._replace(device_uuid="GPU-7"), True, "GPU GPU-7 is not visible here"),
        (NEAR._replace(rdma=False), FAR, False, "this host has no network card"),
        (NEAR, FAR._replace(rdma=False), False, "the other host has no network card"),
        (NEAR, HOST, True, "one side's pages are in host memory"),
        (HOST, FAR, False, "one side's pages are in host memory"),
    ],
)
def test_what_stands_in_the_way_is_said(
    near: Side, far: Side, one_host: bool, problem: str
) -> None:
    found = reach(near, far, one_host=one_host, device=0)
    assert not found.in_device
    assert found.name == "pinned host memory"
    assert problem in found.problem


def test_no_peer_access_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "can_access_peer", lambda near, far: False)
    found = reach(NEAR, FAR, one_host=True, device=0)
    assert not found.in_device
    assert found.problem == "GPU 0 has no peer access to GPU 1"


@pytest.mark.parametrize("has_card", [True, False])
@pytest.mark.parametrize("has_module", [True, False])
def test_rdma_takes_a_card_and_the_kernels_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_card: bool, has_module: bool
) -> None:
    cards, modules = tmp_path / "infiniband", tmp_path / "module"
    (cards / "mlx5_0").mkdir(parents=True) if has_card else cards.mkdir()
    (modules / "nvidia_peermem").mkdir(parents=True) if has_module else modules.mkdir()
    monkeypatch.setattr(module, "_RDMA_DEVICES", cards)
    monkeypatch.setattr(module, "_MODULES", modules)
    module.has_rdma.cache_clear()
    assert module.has_rdma() == (has_card and has_module)
    module.has_rdma.cache_clear()
