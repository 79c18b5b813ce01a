"""What containers and missing devices keep processes from sharing."""

from kvxfer.diagnose.checks.base import Absent, Answer, Check, Fine, no_gpus, warn
from kvxfer.diagnose.facts import Facts
from kvxfer.diagnose.figures import Figures


def _namespaces(facts: Facts, _: Figures) -> Answer:
    host = facts.host
    if not facts.gpus:
        return no_gpus(facts)
    if host.pid_namespace is None or host.ipc_namespace is None:
        return Absent("the namespaces of the process are not known")
    own = [
        name for name, inode in (("PID", host.pid_namespace), ("IPC", host.ipc_namespace)) if inode
    ]
    if not own:
        return Fine("the host's own PID and IPC namespaces")
    inodes = ", ".join(inode for inode in (host.pid_namespace, host.ipc_namespace) if inode)
    return [
        warn(
            "container",
            f"own {' and '.join(own)} namespaces ({inodes})",
            cause="CUDA IPC reaches only processes in the same ones: no NVLink between containers",
            remedy="run both ends in one container or pod, or share --pid and --ipc between them",
        )
    ]


def _imex(facts: Facts, _: Figures) -> Answer:
    if not facts.gpus:
        return no_gpus(facts)
    channels = facts.host.imex_channels
    if channels:
        return Fine(f"{channels} channels")
    clusters = [
        gpu.fabric.cluster.replace("-", "").strip("0")
        for gpu in facts.gpus
        if gpu.fabric is not None
    ]
    if not any(clusters):
        return Absent("no NVLink domain beyond this node; fabric handles are not available")
    return [
        warn(
            "IMEX",
            "GPUs are in an NVLink domain of several nodes, but there is no IMEX channel",
            cause="fabric handles are not available: memory cannot be shared with other nodes",
            remedy="start nvidia-imex on all nodes and create its channels",
        )
    ]


CHECKS = (
    Check("namespaces", "may other processes map GPU memory", _namespaces),
    Check("imex", "may other nodes of the NVLink domain map GPU memory", _imex),
)
