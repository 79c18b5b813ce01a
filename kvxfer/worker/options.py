"""What both workers are made of."""

from dataclasses import dataclass, field
from typing import Final

from kvxfer import _core
from kvxfer.control import SharedKey
from kvxfer.control.addresses import is_loopback, resolve_host
from kvxfer.layout import KVLayout, TPLayout
from kvxfer.memory import MemoryKind
from kvxfer.transport import TRANSPORTS, create_transport
from kvxfer.transport.host_copy import default_num_threads

LOOPBACK_HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """One rank of a worker.

    Args:
        layout: of the whole model.
        rank: which part of it this worker holds.
        transport: a name of :func:`process_transports`, or ``auto``.
        num_threads: threads of host copies and checks.
        device: the CUDA device, where the transport is of device memory.
        bind_host: where it listens.
        key: admits its holders alone.
        insecure: bind beyond loopback without a key.
    """

    layout: KVLayout
    rank: TPLayout = field(default_factory=TPLayout)
    transport: str = "auto"
    num_threads: int = field(default_factory=default_num_threads)
    device: int = 0
    bind_host: str = LOOPBACK_HOST
    key: SharedKey | None = None
    insecure: bool = False


def process_transports() -> tuple[str, ...]:
    """The transports that join processes."""
    return tuple(name for name, kind in TRANSPORTS.items() if kind.capabilities.cross_process)


def choose_transport(name: str, bind_host: str) -> str:
    """The name of a transport that works here.

    ``auto`` is nvlink where there is a GPU, else shm on loopback, and beyond it the first that
    reaches other hosts, if this build has one.

    Raises:
        InvalidUsage: an unknown name.
        NotAvailable: it does not work here, and why.
    """
    if name != "auto":
        return create_transport(name, memory=memory_of(name)).name
    if _core.device_count() > 0 and is_loopback(resolve_host(bind_host)):
        return create_transport("auto", memory=MemoryKind.DEVICE).name
    if not is_loopback(resolve_host(bind_host)):
        for far in ("ucx", "nixl"):
            if far in TRANSPORTS and TRANSPORTS[far].probe().available:
                return far
    return create_transport("auto", memory=MemoryKind.HOST).name


def memory_of(transport: str) -> MemoryKind:
    """The memory that a worker takes for a transport."""
    return MemoryKind.DEVICE if transport == "nvlink" else MemoryKind.HOST
