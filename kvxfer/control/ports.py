"""Which ports the channels of a worker's ranks have, settled before anything is started."""

import contextlib
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvxfer.control.addresses import format_url, resolve_host
from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.layout import TPLayout

MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Ports:
    """One port of the init and one of the alloc channel for each rank of a worker.

    Each rank serves its own init channel. Where one scheduler places blocks for all ranks, it
    serves one alloc channel, and the ranks' alloc ports are aliases of it: it takes
    `for_scheduler`, and the ranks `for_rank` without ``alloc``.

    Attributes:
        init: the init port of each rank.
        alloc: the alloc port of each rank.

    Raises:
        InvalidUsage: no rank, unequal numbers of them, a port out of range, or two equal ports.
    """

    init: tuple[int, ...]
    alloc: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.init or len(self.init) != len(self.alloc):
            raise InvalidUsage(
                f"{len(self.init)} init ports {list(self.init)} and {len(self.alloc)} alloc ports "
                f"{list(self.alloc)}; give one of each for every rank"
            )
        _require_distinct((f"{name} of rank {rank}", port) for name, rank, port in self)

    @classmethod
    def derived(cls, base_port: int, num_ranks: int) -> "Ports":
        """Two ports a rank, in a row from ``base_port``: init of rank 0, alloc of rank 0, ...

        Raises:
            InvalidUsage: no rank, or the last port would be above 65535.
        """
        _require_ranks(num_ranks)
        last = base_port + 2 * num_ranks - 1
        if type(base_port) is not int or not 1 <= base_port <= last <= MAX_PORT:
            raise InvalidUsage(
                f"base port {base_port!r} and {num_ranks} ranks need ports {base_port} to {last}; "
                f"they must lie in 1 to {MAX_PORT}"
            )
        return cls(tuple(range(base_port, last, 2)), tuple(range(base_port + 1, last + 1, 2)))

    @classmethod
    def listed(cls, init: Sequence[int], alloc: Sequence[int], num_ranks: int) -> "Ports":
        """The ports of ``num_ranks`` ranks from lists, which must not be shorter.

        Raises:
            InvalidUsage: too few ports, or what `Ports` raises.
        """
        _require_ranks(num_ranks)
        for name, ports in (("init", init), ("alloc", alloc)):
            if len(ports) < num_ranks:
                raise InvalidUsage(
                    f"{len(ports)} {name} ports {list(ports)} for {num_ranks} ranks; list one for "
                    f"every rank"
                )
        return cls(tuple(init[:num_ranks]), tuple(alloc[:num_ranks]))

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Channel, rank and port of each."""
        for name, ports in (("init", self.init), ("alloc", self.alloc)):
            for rank, port in enumerate(ports):
                yield name, rank, port

    def for_rank(self, rank: int) -> dict[str, int]:
        """What the server of one rank takes as ``ports``.

        Raises:
            InvalidUsage: there is no such rank.
        """
        if not 0 <= rank < len(self.init):
            raise InvalidUsage(f"rank {rank} has no ports; there are {len(self.init)} ranks")
        return {"init": self.init[rank], "alloc": self.alloc[rank]}

    def of_rank(self, rank: TPLayout) -> dict[str, int]:
        """`for_rank` of a rank of a parallel layout; those of the first pipeline stage come first.

        Raises:
            InvalidUsage: the layout has another number of ranks than there are ports.
        """
        num_ranks = rank.tp_size * rank.pp_size
        if num_ranks != len(self.init):
            raise InvalidUsage(
                f"ports of {len(self.init)} ranks for a layout of tp {rank.tp_size} x pp "
                f"{rank.pp_size}, which has {num_ranks}; list one of each for every rank"
            )
        return self.for_rank(rank.pp_rank * rank.tp_size + rank.tp_rank)

    def for_scheduler(self) -> dict[str, tuple[int, ...]]:
        """What the server of one scheduler for all ranks takes as ``ports``."""
        return {"alloc": self.alloc}

    def require_free(self, bind_host: str = "127.0.0.1") -> None:
        """Check that every port can be bound now; for the start, before ranks are launched.

        Raises:
            NotAvailable: names all that cannot be bound, with their channels and ranks.
        """
        ip = resolve_host(bind_host)
        family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
        busy = []
        with contextlib.ExitStack() as held:
            for name, rank, port in self:
                probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
                # As libzmq does: a port whose last connections linger may be taken again.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((str(ip), port))
                    probe.listen(1)
                except OSError as error:
                    url = format_url(str(ip), port)
                    busy.append(f"port {port} ({name} of rank {rank}, {url}): {error.strerror}")
        if busy:
            raise NotAvailable(
                f"{len(busy)} of {len(self.init) * 2} ports cannot be bound: {'; '.join(busy)}; "
                f"free them or choose others"
            )


def checked_ports(
    channels: Iterable[str], ports: Mapping[str, int | Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """The ports of each channel, at least one; 0 stands for a free one.

    Raises:
        InvalidUsage: no channel, ports of an unknown channel, out of range, or equal ones.
    """
    names = list(channels)
    if not names or not all(names):
        raise InvalidUsage(f"channels are {names}; name at least one, none of them empty")
    wanted: dict[str, tuple[int, ...]] = dict.fromkeys(names, (0,))
    for name, given in ports.items():
        if name not in wanted:
            raise InvalidUsage(f"port {given} is for channel {name!r}; known are {names}")
        wanted[name] = (given,) if isinstance(given, int) else tuple(given)
        if not wanted[name]:
            raise InvalidUsage(f"channel {name!r} has no port; give it one, or 0 for a free one")
        for port in wanted[name]:
            if type(port) is not int or not 0 <= port <= MAX_PORT:
                raise InvalidUsage(
                    f"port {port!r} of channel {name!r} is out of range; use 0 to {MAX_PORT}"
                )
    _require_distinct(
        (repr(name), port) for name, taken in wanted.items() for port in taken if port
    )
    return wanted


def _require_ranks(num_ranks: int) -> None:
    if type(num_ranks) is not int or num_ranks < 1:
        raise InvalidUsage(f"num_ranks is {num_ranks!r}; use a number of at least 1")


def _require_distinct(ports: Iterable[tuple[str, int]]) -> None:
    owners: dict[int, str] = {}
    for owner, port in ports:
        if type(port) is not int or not 1 <= port <= MAX_PORT:
            raise InvalidUsage(f"port {port!r} of {owner} is out of range; use 1 to {MAX_PORT}")
        if port in owners:
            raise InvalidUsage(
                f"channels {owners[port]} and {owner} both have port {port}; give each its own"
            )
        owners[port] = owner
