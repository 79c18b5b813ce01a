"""What both workers are made of."""

from dataclasses import dataclass, field
from typing import Final

from kvxfer import _core
from kvxfer.control import SharedKey
from kvxfer.control.addresses import is_loopback, resolve_host
from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout, TPLayout
from kvxfer.memory import MemoryKind
from kvxfer.sweep.paths import require_devices
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
        memory: that of the other side where it is known, which this side takes too where it has
            the choice and the GPU.
        num_threads: threads of host copies; None = the measured best.
        device: the CUDA device that holds the cache; None = the first where :func:`device_of`
            takes one.
        bind_host: where it listens.
        key: admits its holders alone.
        insecure: bind beyond loopback without a key.
        strict: make a slower path than the expected one an error.
    """

    layout: KVLayout
    rank: TPLayout = field(default_factory=TPLayout)
    transport: str = "auto"
    memory: MemoryKind | None = None
    num_threads: int | None = None
    device: int | None = None
    bind_host: str = LOOPBACK_HOST
    key: SharedKey | None = None
    insecure: bool = False
    strict: bool = False

    @property
    def check_threads(self) -> int:
        """Threads that fill and check the cache."""
        return self.num_threads or default_num_threads()


def process_transports() -> tuple[str, ...]:
    """The transports that join processes."""
    return tuple(name for name, kind in TRANSPORTS.items() if kind.capabilities.cross_process)


def device_of(options: WorkerOptions) -> int:
    """The CUDA device that holds a worker's cache; -1 = host memory.

    Without a ``device`` that is the first one over NVLink; over a network, which carries both, it
    is where the other side has device memory; and with ``auto`` where a GPU is here that something
    reaches, unless the other side has host memory.

    Raises:
        InvalidUsage: an unknown transport, one that does not move device memory though there is a
            ``device``, or a device that this process does not see.
        NotAvailable: the transport does not work here, or no GPU is, and why.
    """
    if options.transport != "auto":
        create_transport(options.transport, memory=MemoryKind.HOST)
    if options.device is None:
        return 0 if _takes_gpu(options) else -1
    if options.transport != "auto":
        able = TRANSPORTS[options.transport].capabilities
        if MemoryKind.DEVICE not in able.memory:
            raise InvalidUsage(
                f"device {options.device} over {options.transport}, which moves host memory; use "
                "nvlink, nixl or ucx, or name no device"
            )
    require_devices(options.device)
    return options.device


def _takes_gpu(options: WorkerOptions) -> bool:
    if options.transport == "nvlink":
        return True
    movable = (
        frozenset(MemoryKind)
        if options.transport == "auto"
        else TRANSPORTS[options.transport].capabilities.memory
    )
    if _core.device_count() == 0 or MemoryKind.DEVICE not in movable:
        return False
    if options.memory is not None or options.transport != "auto":
        return options.memory is MemoryKind.DEVICE
    beyond_host = not is_loopback(resolve_host(options.bind_host))
    return bool(candidates(MemoryKind.DEVICE, beyond_host=beyond_host))
