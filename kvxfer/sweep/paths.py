"""Which path a sweep takes: transport, SM budgets and GPUs."""

from kvxfer import _core
from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.memory import MemoryKind
from kvxfer.sweep.cases import ALL_SMS, AUTO_SMS, SweepOptions
from kvxfer.transport import create_transport
from kvxfer.transport.device_copy import ENGINES as DEVICE_ENGINES
from kvxfer.transport.host_copy import ENGINES as HOST_ENGINES
from kvxfer.transport.network_link import ENGINES as NETWORK_ENGINES

_ENGINES = {
    "nvlink": tuple(DEVICE_ENGINES),
    "ucx": NETWORK_ENGINES,
    "nixl": NETWORK_ENGINES,
}  # of the others HOST_ENGINES


def resolve_transport(name: str) -> str:
    """The name of a transport that works here; ``auto`` takes NVLink where there is a GPU.

    Raises:
        NotAvailable: it does not work here, and why.
    """
    if name != "auto":
        memory = MemoryKind.DEVICE if name == "nvlink" else MemoryKind.HOST
        return create_transport(name, memory=memory).name
    has_gpu = _core.device_count() > 0
    return create_transport("auto", memory=MemoryKind.DEVICE if has_gpu else MemoryKind.HOST).name


def require_applicable(options: SweepOptions, transport: str) -> None:
    """Refuse what the transport cannot do, before anything is started.

    Raises:
        InvalidUsage: an option or engine that it does not have.
        NotAvailable: compute beside transfers without a GPU.
    """
    on_device = transport == "nvlink"
    if options.peers:
        _require_peers_applicable(options, transport)
    if not on_device:
        if options.compute is not None:
            raise NotAvailable(f"--with-compute needs GPUs; this run is over {transport}")
        if options.sms != (AUTO_SMS,):
            raise InvalidUsage(f"--sms is of copies by a GPU; this run is over {transport}")
        if options.devices is not None or options.rank_devices is not None:
            raise InvalidUsage(f"--devices is of copies by a GPU; this run is over {transport}")
    engines = _ENGINES.get(transport, HOST_ENGINES)
    if options.engine not in engines:
        raise InvalidUsage(
            f"engine {options.engine!r} over {transport}; use {', '.join(engines[:-1])} or "
            f"{engines[-1]}"
        )


def _require_peers_applicable(options: SweepOptions, transport: str) -> None:
    if transport == "loopback":
        raise InvalidUsage("--peers is of two processes; use --transport shm or nvlink")
    if options.ranks is not None or options.compute is not None:
        raise InvalidUsage(
            "--peers is of one pair and its transfers alone; leave --tp, --pp, --kv-heads, "
            "--layouts and --with-compute, or --peers"
        )


def resolve_sms(counts: tuple[int, ...], devices: tuple[int, ...]) -> tuple[int, ...]:
    """SM budgets as numbers of the GPUs at hand; ``AUTO_SMS`` is left to each copy.

    Raises:
        InvalidUsage: more than one of them has.
    """
    available = min(_core.device_info(device).num_sms for device in devices)
    wanted = tuple(available if count == ALL_SMS else count for count in counts)
    if max(wanted) > available:
        raise InvalidUsage(f"{max(wanted)} SMs; these GPUs have {available}")
    return wanted


def choose_devices(wanted: tuple[int, int] | None) -> tuple[int, int]:
    """CUDA devices of source and destination; None = the first two, or the one there is twice.

    Raises:
        InvalidUsage: this process does not see them.
        NotAvailable: there is none, or they have no peer access.
    """
    source, destination = wanted or (0, min(1, _core.device_count() - 1))
    (source,), (destination,) = choose_rank_devices(((source,), (destination,)))
    return source, destination


def choose_rank_devices(
    wanted: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """CUDA devices of the sources and of the destinations, which their ranks take in turn.

    None = the first half and the second half of those there are, or the one there is twice.

    Raises:
        InvalidUsage: this process does not see them.
        NotAvailable: there is none, or a pair has no peer access.
    """
    count = _core.device_count()
    if count == 0:
        raise NotAvailable(_core.no_device_reason())
    sources, destinations = wanted or _halves(count)
    for device in (*sources, *destinations):
        if not 0 <= device < count:
            raise InvalidUsage(f"device {device}; this process sees 0 to {count - 1}")
    for source in sources:
        for destination in destinations:
            if not _core.can_access_peer(source, destination):
                raise NotAvailable(
                    f"GPUs {source} and {destination} have no peer access; use --transport shm"
                )
    return sources, destinations


def _halves(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    half = count // 2
    return tuple(range(half or 1)), tuple(range(half, count))
