"""Which port belongs to what; the numbers are those of the articles that the set-up follows."""

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvxfer.errors import InvalidUsage, NotAvailable

LOOPBACK: Final = "127.0.0.1"
FRONT_PORT: Final = 9100
ENGINE_PORTS: Final = 7100
_SPAN = 100  # of each purpose
_SIDE_STEP = 10  # NixlConnector takes one a data-parallel rank
_PURPOSES = 6
_MAX_PORT = 65535


class StorePorts(NamedTuple):
    """Ports of a store beside an engine, and of a far one that it reads from.

    Attributes:
        requests: of the engine.
        http: health, and what the store says of itself.
        metrics: where it has them apart.
        far_requests, far_http: likewise.
        far_chunks: where the store beside the engine comes for chunks.
    """

    requests: int
    http: int
    metrics: int
    far_requests: int
    far_http: int
    far_chunks: int

    @property
    def near(self) -> tuple[int, int, int]:
        """Those of the store beside the engine."""
        return self[:3]

    @property
    def far(self) -> tuple[int, int, int]:
        """Those of the far one."""
        return self[3:]


@dataclass(frozen=True, slots=True)
class PortPlan:
    """Ports of a set-up: a hundred for each purpose from ``base`` on.

    Raises:
        InvalidUsage: they do not fit below 65536.
    """

    base: int = ENGINE_PORTS

    def __post_init__(self) -> None:
        last = _MAX_PORT - _PURPOSES * _SPAN + 1
        if not 1 <= self.base <= last:
            raise InvalidUsage(f"engine ports from {self.base}; use 1 to {last}")

    def prefill(self, index: int) -> int:
        """The HTTP port of a prefill engine, or of the one engine."""
        return self.base + index

    def decode(self, index: int) -> int:
        """The HTTP port of a decode engine."""
        return self.base + _SPAN + index

    def init(self, index: int, tp_size: int) -> tuple[int, ...]:
        """The init channels of a decode engine, one a rank."""
        return self._ranks(2, index, tp_size)

    def alloc(self, index: int, tp_size: int) -> tuple[int, ...]:
        """The alloc channels of a decode engine, one a rank."""
        return self._ranks(3, index, tp_size)

    @property
    def notification(self) -> int:
        """Where LMCache's prefill engines tell the proxy that KV has moved."""
        return self.base + 4 * _SPAN

    @property
    def store(self) -> StorePorts:
        """Stores of KV beside an engine."""
        first = self.notification + 1
        return StorePorts(*range(first, first + len(StorePorts._fields)))

    def side(self, engine: int) -> int:
        """The side channel of NixlConnector of any engine, counted through."""
        return self.base + 5 * _SPAN + engine * _SIDE_STEP

    def _ranks(self, purpose: int, index: int, tp_size: int) -> tuple[int, ...]:
        first = self.base + purpose * _SPAN + index * tp_size
        ports = tuple(range(first, first + tp_size))
        if ports[-1] >= self.base + (purpose + 1) * _SPAN:
            raise InvalidUsage(
                f"decode engine {index} with {tp_size} ranks needs port {ports[-1]}; {_SPAN} are "
                "kept for all ranks of decode engines"
            )
        return ports


def require_free(host: str, ports: Iterable[int]) -> None:
    """Check that nobody listens on any of ``ports``.

    Raises:
        NotAvailable: names those that are taken.
    """
    taken = [port for port in ports if not _is_free(host, port)]
    if taken:
        raise NotAvailable(
            f"ports in use on {host}: {', '.join(map(str, taken))}; end what listens there, or "
            "move with --port and --engine-ports"
        )


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
