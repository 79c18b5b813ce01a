"""What both workers are made of."""

from dataclasses import dataclass, field
from typing import Final

from kvxfer import _core
from kvxfer.control import SharedKey
from kvxfer.control.addresses import is_loopback, resolve_host
from kvxfer.layout import KVLayout, TPLayout
from kvxfer.memory import MemoryKind
from kvxfer.transport import TRANSPORTS, candidates, create_transport
from kvxfer.transport.host_copy import default_num_threads

LOOPBACK_HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """One rank of a worker.

    Args:
        layout: of the whole model.
        rank: which part of it this worker holds.
        transport: a name of :func:`process_transports`, or ``auto``.
        memory: with ``auto``, that of the other side where it is known; None = a GPU's where there
            is one that something reaches.
        num_threads: threads of host copies and checks.
        device: the CUDA device, where the transport is of device memory.
        bind_host: where it listens.
        key: admits its holders alone.
        insecure: bind beyond loopback without a key.
        strict: make a slower path than the expected one an error.
    """

    layout: KVLayout
    rank: TPLayout = field(default_factory=TPLayout)
    transport: str = "auto"
    memory: MemoryKind | None = None
    num_threads: int = field(default_factory=default_num_threads)
    device: int = 0
    bind_host: str = LOOPBACK_HOST
    key: SharedKey | None = None
    insecure: bool = False
    strict: bool = False


def process_transports() -> tuple[str, ...]:
    """The transports that join processes."""
    return tuple(name for name, kind in TRANSPORTS.items() if kind.capabilities.cross_process)


def memory_of(options: WorkerOptions) -> MemoryKind:
    """The memory that a worker takes: what its transport moves, and of a GPU where it may choose.

    Raises:
        InvalidUsage: an unknown transport.
        NotAvailable: the transport does not work here, and why.
    """
    if options.transport != "auto":
        memory = MemoryKind.DEVICE if options.transport == "nvlink" else MemoryKind.HOST
        create_transport(options.transport, memory=memory)
        return memory
    if options.memory is not None:
        return options.memory
    beyond_host = not is_loopback(resolve_host(options.bind_host))
    has_path = bool(candidates(MemoryKind.DEVICE, beyond_host=beyond_host))
    return MemoryKind.DEVICE if _core.device_count() > 0 and has_path else MemoryKind.HOST
