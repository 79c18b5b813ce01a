"""Loopback through an RDMA device: two processes of this host that UCX joins by it.

The processes find each other over the loopback interface, since a device need have no address; so
UCX may use that, too. Whether the device carried the bytes is seen by that interface's counter, and
there is no figure where it did not.
"""

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from kvxfer.diagnose.figures import NIC_HOST
from kvxfer.diagnose.measure.events import Skipped, Task
from kvxfer.diagnose.measure.host import measure_pair
from kvxfer.diagnose.measure.host_device import on_cpus
from kvxfer.diagnose.measure.node import PAGE_BYTES
from kvxfer.diagnose.measure.schedule import Schedule
from kvxfer.errors import KvxferError, NotAvailable
from kvxfer.sweep.cases import raw_layout
from kvxfer.sweep.pair import Pair, PairFactory, PeerProcesses

WHAT = "NICs"
_LOOPBACK = "lo"
_SENT_BYTES = Path(f"/sys/class/net/{_LOOPBACK}/statistics/tx_bytes")
_NUM_PLANES = 1  # one range, as large as can be
# What finding each other and acknowledging may take of the loopback interface.
_MOST_BESIDE = 0.1


def nic_environment(name: str, port: int | None = None) -> dict[str, str]:
    """Variables with which UCX uses one device, the loopback interface, and no shared memory.

    Args:
        name: of the device, or of a network interface, which stands in for one.
        port: of an RDMA device.
    """
    device = name if port is None else f"{name}:{port}"
    devices = [device] if name == _LOOPBACK else [device, _LOOPBACK]
    single = {f"UCX_MAX_{what}_RAILS": "1" for what in ("EAGER", "RMA", "RNDV")}
    return {"UCX_NET_DEVICES": ",".join(devices), "UCX_TLS": "^sm", **single}


def measure_nic(task: Task, schedule: Schedule) -> None:
    """The device ``task.nic``, in a process that was started with its environment."""
    try:
        _measure(task, schedule)
    except KvxferError as error:
        schedule.emit(Skipped(WHAT, f"{task.nic}: {error}"))


def _measure(task: Task, schedule: Schedule) -> None:
    layout = raw_layout(PAGE_BYTES, _NUM_PLANES)
    cpus = [cpu for some in task.numa_cpus.values() for cpu in some]
    with ExitStack() as stack:
        stack.enter_context(on_cpus(cpus))
        processes = PeerProcesses()
        stack.callback(processes.close)
        factory = PairFactory(processes)
        stack.callback(factory.close)
        pair = factory(
            layout=layout,
            num_blocks=task.host_bytes // layout.block_bytes,
            transport="ucx",
            memory="private",
            num_threads=task.num_threads,
        )
        require_device(pair, task.nic)
        measure_pair(pair, schedule, (NIC_HOST, task.nic, task.nic))


def require_device(pair: Pair, name: str) -> None:
    """Move everything once, and see that it went through the device.

    Raises:
        NotAvailable: the device is no part of the path, or the loopback interface carried it.
    """
    path = pair.peer.link.path
    lanes = path.removeprefix("ucx ").split(", ")
    if name not in {lane.partition("/")[2].partition(":")[0] for lane in lanes}:
        raise NotAvailable(f"UCX takes {path!r}")
    if name == _LOOPBACK:
        return
    ids = np.arange(pair.num_blocks, dtype=np.int64)
    before = _sent_bytes()
    pair.put(ids, ids)
    beside = _sent_bytes() - before
    if beside > _MOST_BESIDE * pair.total_bytes(ids):
        raise NotAvailable(
            f"{beside} bytes went over the loopback interface while {pair.total_bytes(ids)} were "
            f"to go through the device (path {path!r}); measure again without other load there"
        )


def _sent_bytes() -> int:
    try:
        return int(_SENT_BYTES.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise NotAvailable(f"the loopback interface does not count its bytes: {error}") from error
