"""Hosts and ports of control channels, checked before a socket sees them."""

import ipaddress
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.ip import IpAddress, unmapped

_ADDRESS = re.compile(r"(?:tcp://)?(?:\[([^\[\]/]+)\]|([^\[\]/:]+)):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A numeric address to bind or to dial."""

    ip: IpAddress
    port: int

    @property
    def is_ipv6(self) -> bool:
        """Whether the socket needs IPv6."""
        return self.ip.version == 6

    @property
    def url(self) -> str:
        """The address for ZeroMQ."""
        return format_url(str(self.ip), self.port)


def format_url(host: str, port: int) -> str:
    """``tcp://host:port``, with brackets around an IPv6 literal."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def resolve_host(host: str) -> IpAddress:
    """Numeric address of a literal or a name; IPv4 first, because that is the default bind.

    Raises:
        InvalidUsage: empty, or an IPv6 zone id.
        NotAvailable: the name has no address.
    """
    name = host.strip()
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    if not name:
        raise InvalidUsage("the host is empty; give an address such as 127.0.0.1, ::1 or a name")
    if "%" in name:
        raise InvalidUsage(
            f"host {host!r} has a zone id, which holds on one machine only; use a routable address"
        )
    if name == "*":
        name = "0.0.0.0"
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NotAvailable(
            f"host {host!r} has no address: {error}; check the name or give a numeric address"
        ) from error
    # sockaddr[0] may carry a zone id for a link-local address that DNS returned.
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    return min(addresses, key=lambda address: address.version)


def parse_url(url: str, find: Callable[[str], IpAddress] = resolve_host) -> Resolved:
    """Resolve the address of a peer.

    Args:
        url: ``tcp://host:port`` or ``host:port``.
        find: looks up the host; a name may take as long as the resolver does.

    Raises:
        InvalidUsage: not ``tcp://host:port`` or ``host:port``, port out of range, or a wildcard
            host.
        NotAvailable: the host has no address.
    """
    match = _ADDRESS.fullmatch(url) if isinstance(url, str) else None
    if match is None:
        raise InvalidUsage(
            f"{url!r} is not an address; write tcp://host:port, with IPv6 as tcp://[::1]:port"
        )
    port = int(match[3])
    if not 1 <= port <= 65535:
        raise InvalidUsage(f"port {port} of {url!r} is out of range; use 1 to 65535")
    ip = find(match[1] or match[2])
    if is_wildcard(ip):
        raise InvalidUsage(
            f"{url!r} names a wildcard, so it would reach this host and not the peer; "
            f"the peer must advertise a routable address"
        )
    return Resolved(ip, port)


def is_wildcard(ip: IpAddress) -> bool:
    """Whether the address stands for every interface."""
    return unmapped(ip).is_unspecified


def is_loopback(ip: IpAddress) -> bool:
    """Whether only this host reaches the address."""
    return unmapped(ip).is_loopback


def advertised_host(bind_ip: IpAddress, advertise_host: str | None) -> str:
    """The host that peers are told to dial.

    Raises:
        InvalidUsage: a wildcard bind without ``advertise_host``, or one that peers cannot dial.
    """
    if advertise_host is None:
        if is_wildcard(bind_ip):
            raise InvalidUsage(
                f"bind_host {bind_ip} is a wildcard, which no peer can dial; give advertise_host, "
                f"or bind one address"
            )
        return str(bind_ip)
    ip = resolve_host(advertise_host)
    if is_wildcard(ip):
        raise InvalidUsage(
            f"advertise_host {advertise_host!r} is a wildcard; give an address that peers reach"
        )
    if is_loopback(ip) and not is_loopback(bind_ip):
        raise InvalidUsage(
            f"advertise_host {advertise_host!r} is loopback while bind_host is {bind_ip}: a remote "
            f"peer would dial itself; advertise a routable address or bind 127.0.0.1"
        )
    return advertise_host.strip().strip("[]")
