"""Loopback through one device by UCX, which here is the loopback interface and TCP.

The code is that of RDMA devices, of which there is none here: processes, variables, the check that
nothing else carried the bytes, and the bytes themselves.
"""

import os
import socket
from pathlib import Path

import pytest

from kvxfer.diagnose.figures import NIC_HOST, Figures
from kvxfer.diagnose.measure.events import Task
from kvxfer.diagnose.measure.nic_runs import nic_task
from kvxfer.diagnose.measure.nics import nic_environment
from kvxfer.diagnose.measure.runner import run_measurements
from kvxfer.transport import available_transports

_FOUND = available_transports()["ucx"]
pytestmark = pytest.mark.skipif(not _FOUND.available, reason=_FOUND.reason)
_OTHERS = [
    name
    for _, name in socket.if_nameindex()
    if Path(f"/sys/class/net/{name}/operstate").read_text().strip() == "up"
]
_CPUS = {0: tuple(sorted(os.sched_getaffinity(0)))}
_REST = Task(area_bytes=1 << 20, host_bytes=4 << 20, rounds=2, budget_s=60.0, num_threads=1)


def measured(name: str, device: str) -> Figures:
    task = nic_task(name, _CPUS, _REST, budget_s=30.0)
    return run_measurements(task, variables=nic_environment(device))


def test_every_byte_goes_through_the_device() -> None:
    before = _num_bytes("lo")
    figures = measured("lo", "lo")
    assert figures.skipped == {}
    (figure,) = figures.all
    assert figure.key == (NIC_HOST, "lo", "lo")
    assert figure.is_right
    assert figure.gb_per_s
    assert (figure.rounds, figure.num_bytes) == (2, 4 << 20)
    assert _num_bytes("lo") - before >= (figure.rounds + 1) * figure.num_bytes


def test_a_device_that_ucx_does_not_take_is_no_figure() -> None:
    figures = measured("mlx5_0", "lo")
    assert figures.all == []
    assert "mlx5_0: UCX takes 'ucx tcp/lo'" in figures.skipped["NICs"]


def test_a_device_that_is_not_there_is_no_figure() -> None:
    figures = measured("nodevice0", "nodevice0")
    assert figures.all == []
    assert figures.skipped["NICs"].startswith("nodevice0: ")


@pytest.mark.skipif(not _OTHERS, reason="no interface is up but that of loopback")
def test_bytes_that_the_loopback_interface_carried_are_no_figure() -> None:
    """As the kernel has it carry what an interface sends to itself."""
    figures = measured(_OTHERS[0], _OTHERS[0])
    assert figures.all == []
    assert "bytes went over the loopback interface" in figures.skipped["NICs"]


def _num_bytes(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())
