"""Caches of two GPUs over NIXL; tests/gpu has more of it on one."""

from pathlib import Path

import pytest
from cache_content import shape
from gpu_pairs import DeviceChild, linked_devices
from sweep_runs import rows_of, sweep
from transport_pairs import NIXL, UCX, require_available

from kvxfer.transport import Tuning
from kvxfer.transport.nixl import NixlTransport

CACHE = shape(num_layers=4, num_kv_heads=8, head_dim=128, num_blocks=1024)  # pages of 8 KiB
IDS = list(range(CACHE.num_blocks))
OURS, THEIRS = IDS[::2], IDS[1::2]  # what the far side gets, and what it is asked for


@pytest.mark.parametrize("devices", [(0, 1), (1, 0)], ids=["0-to-1", "1-to-0"])
@pytest.mark.parametrize("in_device", [True, False], ids=["device slots", "host slots"])
@pytest.mark.parametrize("engine", ["direct", "staged"])
def test_put_and_get(
    child: DeviceChild, devices: tuple[int, int], in_device: bool, engine: str
) -> None:
    require_available(NIXL)
    near = NixlTransport(2, in_device=in_device)
    with linked_devices(
        child, CACHE, transport="nixl", local_transport=near, devices=devices
    ) as pair:
        tuning = Tuning(engine=engine)
        pair.put(OURS, OURS[::-1], tuning=tuning)
        pair.check()
        pair.get(THEIRS, THEIRS[::-1], tuning=tuning)
        pair.check()


def test_the_path_is_cuda_ipc(child: DeviceChild) -> None:
    require_available(NIXL)
    with linked_devices(child, transport="nixl", devices=(0, 1)) as pair:
        assert pair.put([0], [1]) == "nixl UCX by cuda_ipc, WRITE, device slots"
        pair.check()


def test_put_and_get_over_ucx(child: DeviceChild) -> None:
    require_available(UCX)
    with linked_devices(child, CACHE, transport="ucx", devices=(0, 1)) as pair:
        assert "pinned host slots" in pair.put(OURS, OURS[::-1])
        pair.check()
        pair.get(THEIRS, THEIRS[::-1])
        pair.check()


def test_a_sweep_over_nixl(tmp_path: Path) -> None:
    require_available(NIXL)
    result = sweep(tmp_path, "--transport", "nixl", "--devices", "0,1", "--op", "put,get")
    rows = rows_of(tmp_path, result)
    assert [row["op"] for row in rows] == ["put", "get"]
    for row in rows:
        assert row["memory"] == "device"
        assert row["actual_path"].startswith("nixl UCX by cuda_ipc, ")
