"""A cache on this side linked to one on the far side, for every way that works on a CPU."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
from cache_content import Bytes, CacheShape, check_content, shape
from free_ports import channel_ports
from leaks import resources
from peer_host import PeerHost
from peer_process import RemotePeer

from kvxfer import Peer
from kvxfer.errors import NotAvailable
from kvxfer.transport import Transport, available_transports

LOCAL_SEED = 1
REMOTE_SEED = 2


@dataclass(frozen=True)
class Kind:
    """A transport, and the memory that both sides have their pages in."""

    transport: str
    memory: str
    in_two_processes: bool

    def __str__(self) -> str:
        return f"{self.transport}-{self.memory}"


LOOPBACK = Kind("loopback", "private", False)
SHM_SHARED = Kind("shm", "shared", True)
SHM_PRIVATE = Kind("shm", "private", True)
ON_ONE_HOST = [LOOPBACK, SHM_SHARED, SHM_PRIVATE]
UCX = Kind("ucx", "private", True)
NIXL = Kind("nixl", "private", True)
KINDS = [*ON_ONE_HOST, UCX, NIXL]


@dataclass(frozen=True)
class Pair:
    """Two caches that are linked: this side's, which copies, and the far one."""

    kind: Kind
    local: PeerHost
    remote: RemotePeer
    peer: Peer
    remote_opened: dict[str, Any]

    def resources(self) -> dict[str, int]:
        """What both processes hold."""
        near = {f"near {name}": value for name, value in resources().items()}
        far = {f"far {name}": value for name, value in self.remote.call("resources").items()}
        return near | far

    def check_both(self, *, local: Bytes | None = None, remote: Bytes | None = None) -> None:
        """Every byte of both sides, guards included; None stands for what it was filled with."""
        local = self.local.shape.content(LOCAL_SEED) if local is None else local
        remote = self.remote.shape.content(REMOTE_SEED) if remote is None else remote
        check_content(self.local.shape, self.local.content(), local)
        check_content(self.remote.shape, self.remote.content(), remote)


LinkPair = Callable[..., AbstractContextManager[Pair]]


@contextmanager
def linked(
    kind: Kind,
    remote: RemotePeer,
    remote_shape: CacheShape | None = None,
    local_shape: CacheShape | None = None,
    *,
    opened_with: Mapping[str, Any] = MappingProxyType({}),
    **connect_args: Any,
) -> Iterator[Pair]:
    """Open a cache on both sides, ``opened_with`` these, and connect this one to the far one."""
    require_available(kind)
    remote_shape = remote_shape or shape()
    args = {"memory": kind.memory, "transport": kind.transport, **opened_with}
    opened = remote.open(remote_shape, seed=REMOTE_SEED, ports=channel_ports(), **args)
    local = PeerHost()
    try:
        own = local_shape or remote_shape
        local.open(
            layout=own.fields,
            num_blocks=own.num_blocks,
            num_arrays=own.num_arrays,
            seed=LOCAL_SEED,
            **args,
        )
        with _connect(kind, local, opened["addresses"], **connect_args) as peer:
            yield Pair(kind, local, remote, peer, opened)
    finally:
        local.close()
        remote.release()


@contextmanager
def skip_without_attach(kind: Kind) -> Iterator[None]:
    """Skip where connecting fails because this host does not allow what private memory needs."""
    try:
        yield
    except NotAvailable as error:
        if kind.memory == "private" and "denies access" in str(error):
            pytest.skip(f"this host allows no cross-memory attach: {error}")
        raise


def require_available(kind: Kind) -> None:
    """Skip where the transport is not here, with its own reason."""
    found = available_transports()[kind.transport]
    if not found.available:
        pytest.skip(f"{kind.transport}: {found.reason}")


def _connect(kind: Kind, local: PeerHost, addresses: dict[str, str], **args: Any) -> Peer:
    with skip_without_attach(kind):
        return local.endpoint.connect(addresses, **args)


@contextmanager
def linked_to_child(
    child: RemotePeer, cache: CacheShape, transport: Transport
) -> Iterator[tuple[PeerHost, Peer]]:
    """This side, which posts by ``transport``, and its link to a cache in a child."""
    opened = child.open(cache, seed=2, memory="private", transport=transport.name)
    local = PeerHost()
    local.open(
        layout=cache.fields,
        num_blocks=cache.num_blocks,
        num_arrays=1,
        memory="private",
        transport=transport,  # type: ignore[arg-type]
        seed=1,
    )
    try:
        with local.endpoint.connect(opened["addresses"]) as peer:
            yield local, peer
    finally:
        local.close()
