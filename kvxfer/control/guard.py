"""Who may bind where: beyond loopback only with a key, or where someone says that it is safe."""

from kvxfer.control.addresses import (
    advertised_host,
    is_loopback,
    is_wildcard,
    resolve_host,
)
from kvxfer.control.key import SharedKey
from kvxfer.errors import InvalidUsage
from kvxfer.ip import IpAddress


def require_guard(ip: IpAddress, key: SharedKey | None, insecure: bool) -> None:
    """Check that other hosts than this one reach ``ip`` on purpose alone.

    Raises:
        InvalidUsage: ``ip`` is not of loopback, and there is neither ``key`` nor ``insecure``.
    """
    if key is None and not insecure and not is_loopback(ip):
        raise InvalidUsage(
            f"bind_host {ip} lets other hosts in, and there is no key; give one (key=, --key), "
            "bind 127.0.0.1, or say insecure=True (--insecure) if only trusted hosts reach this "
            "network"
        )


def guarded_host(
    bind_host: str, advertise_host: str | None, key: SharedKey | None, insecure: bool
) -> str:
    """The numeric address at which a transport of this process listens, and is dialled.

    That is ``bind_host``, or ``advertise_host`` where the former is a wildcard, which no peer can
    dial.

    Raises:
        InvalidUsage: an unusable host, or what `require_guard` raises.
        NotAvailable: a name has no address.
    """
    ip = resolve_host(bind_host)
    dialled = advertised_host(ip, advertise_host)
    require_guard(ip, key, insecure)
    return str(resolve_host(dialled) if is_wildcard(ip) else ip)
