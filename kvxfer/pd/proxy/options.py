"""What a proxy is told when it starts."""

from dataclasses import dataclass, field
from typing import Final, Literal

LOOPBACK_HOST: Final = "127.0.0.1"
CONNECTORS: Final = ("kvxfer", "nixl", "lmcache", "lmcache-together")
ROUTINGS: Final = ("least-tokens", "prefix-affinity")

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Channels:
    """Where one rank of a decode engine takes KV: its init and its alloc channel."""

    host: str
    init_port: int
    alloc_port: int


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """One engine: its HTTP server, and for a decode engine the channels of its ranks in order."""

    role: Role
    host: str
    port: int
    channels: tuple[Channels, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a client and an engine may take.

    Args:
        body_bytes: of a request.
        header_s: until a new connection has sent the header of its first request.
        body_s: until a client has sent its body.
        connect_s: until an engine accepts a connection.
        request_s: from accepting a request to its last byte.
        probe_s: until an engine answers ``/health``.
        refusal_s: how long a refusal of the prefill engine waits for the decode engine's own.
        leave_s: how long a prefill goes on without its client, to say where its KV is (nixl).
        notice_s: from the prefill's answer to the last notice that KV has arrived (lmcache).
        discard_s: to take KV that nobody wants any more off the engines.
    """

    body_bytes: int = 32 << 20
    header_s: float = 30.0
    body_s: float = 30.0
    connect_s: float = 2.0
    request_s: float = 3600.0
    probe_s: float = 5.0
    refusal_s: float = 0.5
    leave_s: float = 1.0
    notice_s: float = 60.0
    discard_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyOptions:
    """All of it.

    Args:
        engines: prefill and decode engines, at least one of each.
        connector: what moves KV between them.
        routing: how engines are chosen.
        host: the address to bind; port 0 takes a free one.
        notice_host: the address to bind for LMCache's notices, with ``notice_port``.
        api_key: what the engines are sent where a client sends no Authorization header.
    """

    engines: tuple[EngineAddress, ...]
    connector: str = "kvxfer"
    routing: str = "least-tokens"
    host: str = LOOPBACK_HOST
    port: int = 9100
    notice_host: str = LOOPBACK_HOST
    notice_port: int = 7500
    api_key: str | None = field(default=None, repr=False)
    limits: Limits = field(default_factory=Limits)
