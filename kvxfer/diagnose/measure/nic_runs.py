"""Loopback through each RDMA device that is up, a process each: UCX reads its setting once."""

import time
from collections.abc import Callable

from msgspec.structs import replace

from kvxfer.diagnose.facts import Facts, Nic
from kvxfer.diagnose.figures import Figures
from kvxfer.diagnose.measure.events import Task
from kvxfer.diagnose.measure.nics import WHAT, nic_environment
from kvxfer.diagnose.measure.runner import run_measurements
from kvxfer.errors import NotAvailable
from kvxfer.transport.network_libraries import ucx_library


def add_nics(
    figures: Figures, facts: Facts, task: Task, *, budget_s: float, tell: Callable[[str], None]
) -> None:
    """Add a figure of each device, or why there is none.

    Args:
        figures: which they are added to.
        facts: of this node.
        task: what was measured of the rest: bytes, rounds, threads and CPUs are taken from it.
        budget_s: after so many seconds no device is begun; 0 = they are left out.
        tell: is told what is measured now.
    """
    reason = why_not(facts, budget_s)
    deadline_s = time.monotonic() + budget_s
    for nic in facts.hardware_nics if not reason else ():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            reason = f"no time was left for {nic.name}"
            break
        if not nic.active:
            continue
        found = run_measurements(
            nic_task(nic.name, _near(nic, task.numa_cpus), task, budget_s=left_s),
            variables=nic_environment(nic.name, _fastest_port(nic)),
            tell=tell,
        )
        figures.all += found.all
        figures.skipped = found.skipped | figures.skipped
    if reason:
        figures.skipped.setdefault(WHAT, reason)


def nic_task(name: str, cpus: dict[int, tuple[int, ...]], task: Task, *, budget_s: float) -> Task:
    """What the process of one device is asked for: as ``task``, but of that device alone."""
    return replace(task, nic=name, devices={}, pcis={}, numa_cpus=cpus, budget_s=budget_s)


def why_not(facts: Facts, budget_s: float) -> str:
    """Why no device is measured; empty where they are."""
    if not facts.hardware_nics:
        return "no RDMA device here; those that the kernel emulates do not count"
    if not any(nic.active for nic in facts.hardware_nics):
        return "no RDMA device is up"
    if budget_s <= 0:
        return "--quick leaves them out"
    try:
        library = ucx_library()
    except NotAvailable as error:
        return f"they are measured through UCX: {error}"
    if not library.has_verbs:
        return (
            f"the UCX here ({library.source}) knows no RDMA devices: install the system's, with "
            "verbs; or give --from what ib_write_bw printed"
        )
    return ""


def _fastest_port(nic: Nic) -> int:
    ports = [port for port in nic.ports if port.state == "active"]
    return max(ports, key=lambda port: port.gbit_per_s or 0.0).number


def _near(nic: Nic, cpus: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """CPUs of the device's NUMA node, where some may be used; else of all nodes."""
    node = nic.numa_node
    return {node: cpus[node]} if node is not None and node in cpus else cpus
