"""Which path a sweep takes: transport, SM budgets and GPUs."""

from kvxfer import _core
from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.memory import MemoryKind
from kvxfer.session.meeting import is_of_this_host
from kvxfer.sweep.cases import ALL_SMS, AUTO_SMS, SweepOptions, is_on_device
from kvxfer.transport import TRANSPORTS, choose, create_transport
from kvxfer.transport.device_copy import ENGINES as DEVICE_ENGINES
from kvxfer.transport.host_copy import ENGINES as HOST_ENGINES
from kvxfer.transport.network_link import ENGINES as NETWORK_ENGINES

_ENGINES = {
    "nvlink": tuple(DEVICE_ENGINES),
    "ucx": NETWORK_ENGINES,
    "nixl": NETWORK_ENGINES,
}  # of the others HOST_ENGINES


def resolve_transport(name: str, far_address: str = "") -> str:
    """The name of a transport that works here; ``auto`` takes NVLink where there is a GPU.

    To an agent at ``far_address`` it takes what reaches that host, of host memory.

    Raises:
        NotAvailable: it does not work here, and why.
    """
    if name != "auto":
        memory = MemoryKind.DEVICE if name == "nvlink" else MemoryKind.HOST
        return create_transport(name, memory=memory).name
    if far_address:
        return choose(MemoryKind.HOST, beyond_host=not is_of_this_host(far_address))
    return choose(MemoryKind.DEVICE if _core.device_count() > 0 else MemoryKind.HOST)


def require_applicable(options: SweepOptions, transport: str) -> None:
    """Refuse what the transport cannot do, before anything is started.

    Raises:
        InvalidUsage: an option or engine that it does not have.
        NotAvailable: an option of GPUs, and none is here.
    """
    on_device = is_on_device(options, transport)
    if options.peers:
        _require_peers_applicable(options, transport)
    if options.far_address:
        _require_far_applicable(options, transport)
    able = TRANSPORTS[transport].capabilities
    if on_device and not (MemoryKind.DEVICE in able.memory and able.cross_process):
        raise InvalidUsage(f"device memory over {transport}; use nvlink, nixl or ucx")
    if not on_device:
        _refuse_gpu_options(options, transport)
    engines = _ENGINES.get(transport, HOST_ENGINES)
    if options.engine not in engines:
        raise InvalidUsage(
            f"engine {options.engine!r} over {transport}; use {', '.join(engines[:-1])} or "
            f"{engines[-1]}"
        )


def _refuse_gpu_options(options: SweepOptions, transport: str) -> None:
    given = {
        "--with-compute": options.compute is not None,
        "--sms": options.sms != (AUTO_SMS,),
        "--devices": options.devices is not None or options.rank_devices is not None,
    }
    for option, is_given in given.items():
        if not is_given:
            continue
        text = f"{option} is of copies by a GPU; this run is over {transport}"
        if options.transport == "auto":  # with a GPU it would have been another
            raise NotAvailable(f"{text}: {_core.no_device_reason()}")
        raise InvalidUsage(text)


def _require_far_applicable(options: SweepOptions, transport: str) -> None:
    if transport in ("loopback", "nvlink"):
        raise InvalidUsage(
            f"--peer is of another process, maybe of another host, and {transport} does not reach "
            "it; use --transport ucx or nixl, or leave --peer"
        )
    if options.ranks is not None or options.peers:
        raise InvalidUsage(
            "--peer is of one pair; leave --tp, --pp, --kv-heads, --layouts and --peers, or --peer"
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


def require_devices(*devices: int) -> None:
    """Check that this process sees these CUDA devices.

    Raises:
        InvalidUsage: not one of them.
        NotAvailable: it sees none at all, and why.
    """
    count = _core.device_count()
    if count == 0:
        raise NotAvailable(_core.no_device_reason())
    for device in devices:
        if not 0 <= device < count:
            raise InvalidUsage(f"device {device}; this process sees 0 to {count - 1}")


def choose_devices(wanted: tuple[int, int] | None, transport: str) -> tuple[int, int]:
    """CUDA devices of source and destination; None = the first two, or the one there is twice.

    Raises:
        InvalidUsage: this process does not see them.
        NotAvailable: there is none, or they have no peer access, which ``transport`` needs.
    """
    source, destination = wanted or (0, min(1, _core.device_count() - 1))
    (source,), (destination,) = choose_rank_devices(((source,), (destination,)), transport)
    return source, destination


def choose_near_devices(wanted: tuple[int, int] | None) -> tuple[int, int]:
    """The same for a far side of another host, which alone knows its own; None = the first of each.

    Raises:
        NotAvailable: there is none here.
    """
    if _core.device_count() == 0:
        raise NotAvailable(_core.no_device_reason())
    return wanted or (0, 0)


def choose_rank_devices(
    wanted: tuple[tuple[int, ...], tuple[int, ...]] | None, transport: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """CUDA devices of the sources and of the destinations, which their ranks take in turn.

    None = the first half and the second half of those there are, or the one there is twice.

    Raises:
        InvalidUsage: this process does not see them.
        NotAvailable: there is none, or a pair has no peer access, which ``transport`` needs.
    """
    sources, destinations = wanted or _halves(_core.device_count())
    require_devices(*sources, *destinations)
    if TRANSPORTS[transport].capabilities.crosses_hosts:
        return sources, destinations  # as it does without peer access between those
    for source in sources:
        for destination in destinations:
            if not _core.can_access_peer(source, destination):
                raise NotAvailable(
                    f"GPUs {source} and {destination} have no peer access; use --transport nixl or "
                    "ucx, or shm for host memory"
                )
    return sources, destinations


def _halves(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    half = count // 2
    return tuple(range(half or 1)), tuple(range(half, count))
