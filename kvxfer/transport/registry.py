"""The transports by name, and which of them work here."""

from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.memory import MemoryKind
from kvxfer.transport import tuned
from kvxfer.transport.base import Availability, Transport
from kvxfer.transport.loopback import LoopbackTransport
from kvxfer.transport.network_libraries import library_versions
from kvxfer.transport.nixl import NixlTransport
from kvxfer.transport.nvlink import NvlinkTransport
from kvxfer.transport.shm import ShmTransport
from kvxfer.transport.ucx import UcxTransport

# In the order of measured speed, in which `auto` tries them. Memory that is mapped is faster than
# any network. Over TCP nixl and ucx are level; within a host nixl is faster, whose UCX keeps the
# paths by shared memory that ucx leaves out so that a lost peer is noticed at once.
TRANSPORTS: dict[str, type[Transport]] = {
    NvlinkTransport.name: NvlinkTransport,
    ShmTransport.name: ShmTransport,
    NixlTransport.name: NixlTransport,
    UcxTransport.name: UcxTransport,
    LoopbackTransport.name: LoopbackTransport,
}


def available_transports() -> dict[str, Availability]:
    """Every transport's name with whether it works here, and if not, why not."""
    return {name: kind.probe() for name, kind in TRANSPORTS.items()}


def candidates(memory: MemoryKind, *, beyond_host: bool = False) -> tuple[str, ...]:
    """What `auto` may take between processes, fastest first; none of it was looked for here.

    Within a host in the tuning profile's order, where it has one and was measured with the
    libraries that are here: to other hosts nothing was measured.

    Args:
        memory: of this side's cache.
        beyond_host: only what reaches other hosts too.
    """
    able = tuple(
        name
        for name, kind in TRANSPORTS.items()
        if memory in kind.capabilities.memory
        and kind.capabilities.cross_process
        and (kind.capabilities.crosses_hosts or not beyond_host)
    )
    if beyond_host:
        return able
    return tuned.order(memory.value, able, libraries=library_versions)


def choose(memory: MemoryKind, *, beyond_host: bool = False) -> str:
    """The first of :func:`candidates` that works here.

    Raises:
        NotAvailable: none does; the message says why of each.
    """
    reasons = []
    for name in candidates(memory, beyond_host=beyond_host):
        found = TRANSPORTS[name].probe()
        if found.available:
            return name
        reasons.append(f"{name}: {found.reason}")
    where = "reaches other hosts" if beyond_host else "joins processes"
    raise NotAvailable(
        f"no transport here {where} for {memory.value} memory; {'; '.join(reasons) or 'none can'}"
    )


def create_transport(name: str, *, memory: MemoryKind, num_threads: int | None = None) -> Transport:
    """The transport called ``name``; ``auto`` is the fastest for ``memory`` across processes.

    Raises:
        InvalidUsage: no such name.
        NotAvailable: it does not work here, and why.
    """
    if name == "auto":
        name = choose(memory)
    kind = TRANSPORTS.get(name)
    if kind is None:
        raise InvalidUsage(f"transport {name!r} is unknown; use auto, {', '.join(TRANSPORTS)}")
    found = kind.probe()
    if not found.available:
        raise NotAvailable(f"transport {name}: {found.reason}")
    if kind is NvlinkTransport:
        return NvlinkTransport()
    return kind(num_threads)  # type: ignore[call-arg]
