"""The transports by name, and which of them work here."""

from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.memory import MemoryKind
from kvxfer.transport.base import Availability, Transport
from kvxfer.transport.loopback import LoopbackTransport
from kvxfer.transport.nixl import NixlTransport
from kvxfer.transport.nvlink import NvlinkTransport
from kvxfer.transport.shm import ShmTransport
from kvxfer.transport.ucx import UcxTransport

# In the order in which `auto` tries them.
TRANSPORTS: dict[str, type[Transport]] = {
    NvlinkTransport.name: NvlinkTransport,
    ShmTransport.name: ShmTransport,
    UcxTransport.name: UcxTransport,
    NixlTransport.name: NixlTransport,
    LoopbackTransport.name: LoopbackTransport,
}


def available_transports() -> dict[str, Availability]:
    """Every transport's name with whether it works here, and if not, why not."""
    return {name: kind.probe() for name, kind in TRANSPORTS.items()}


def create_transport(name: str, *, memory: MemoryKind, num_threads: int | None = None) -> Transport:
    """The transport called ``name``; ``auto`` is the first for ``memory`` across processes.

    Raises:
        InvalidUsage: no such name.
        NotAvailable: it does not work here, and why.
    """
    if name == "auto":
        name = next(
            key
            for key, kind in TRANSPORTS.items()
            if memory in kind.capabilities.memory and kind.capabilities.cross_process
        )
    kind = TRANSPORTS.get(name)
    if kind is None:
        raise InvalidUsage(f"transport {name!r} is unknown; use auto, {', '.join(TRANSPORTS)}")
    found = kind.probe()
    if not found.available:
        raise NotAvailable(f"transport {name}: {found.reason}")
    if kind is NvlinkTransport:
        return NvlinkTransport()
    return kind(num_threads)  # type: ignore[call-arg]
