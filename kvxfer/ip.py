"""Numeric addresses of IP."""

import ipaddress
from typing import TypeAlias

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


def unmapped(ip: IpAddress) -> IpAddress:
    """An IPv4 address that is written as IPv6 (``::ffff:127.0.0.1``) as what it stands for."""
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip
