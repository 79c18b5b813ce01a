"""How two endpoints meet, and part."""

import errno
import logging
import socket
from collections.abc import Mapping, Sequence

from kvxfer.control import ControlClient, Done, InitRequest, LeaveRequest, SharedKey
from kvxfer.control.addresses import is_loopback, parse_url
from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable
from kvxfer.layout import Share, ToFp8
from kvxfer.memory import KVCache
from kvxfer.session.layouts import layout_spec, rank_spec
from kvxfer.transport import TransportOffers, Transports

# A peer that is gone does not answer; its board is gone with it.
_LEAVE_S = 0.5
_log = logging.getLogger(__name__)


def init_request(
    cache: KVCache, transports: Sequence[str], connection: str, convert: ToFp8 | None
) -> InitRequest:
    """How this side presents itself; ``transports`` are the names that it offers, best first."""
    return InitRequest(
        incarnation=connection,
        layout=layout_spec(cache.shard.model),
        rank=rank_spec(cache.shard.rank),
        transports=list(transports),
        converts=convert is not None,
    )


def offers_to(transports: Transports, address: str) -> TransportOffers:
    """What is offered to the peer whose init channel is at ``address``."""
    return TransportOffers(transports, is_here=is_of_this_host(address), peer=address)


def is_of_this_host(address: str) -> bool:
    """Whether ``address`` is of this host: only such a one can be bound.

    Raises:
        InvalidUsage: a malformed address.
        NotAvailable: its host has no address, or that cannot be told, as without a free descriptor.
    """
    ip = parse_url(address).ip
    if is_loopback(ip):
        return True
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(ip), 0))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return False
        raise NotAvailable(
            f"cannot tell whether {ip} is of this host: {error.strerror}", error.errno or 0
        ) from error
    return True


def require_addresses(addresses: Mapping[str, str]) -> None:
    """Check that both channels are there, and can be found.

    Raises:
        InvalidUsage: one is missing, or malformed.
        NotAvailable: the host of one has no address.
    """
    missing = {"init", "alloc"} - set(addresses)
    if missing:
        raise InvalidUsage(f"addresses lack {', '.join(sorted(missing))}; pass both channels")
    for address in addresses.values():
        parse_url(address)


def require_scales(cache: KVCache, convert: ToFp8 | None) -> None:
    """Check that a conversion fits the model.

    Raises:
        InvalidUsage: its scales have another shape.
    """
    if convert is not None:
        model = cache.shard.model
        convert.inverse_scales(model, Share(range(model.num_layers), range(model.num_kv_heads)))


def leave(alloc_address: str, connection: str, key: SharedKey | None) -> bool:
    """Tell the peer, which may be gone by now, that nothing more comes from a connection.

    Returns:
        whether it has heard of it. If not, it may still hear of it, at any time: the name must not
        be another connection's then.
    """
    try:
        with ControlClient(alloc_address, Done, deadline_s=_LEAVE_S, key=key) as alloc:
            alloc.call(LeaveRequest(connection))
    except KvxferError as error:
        _log.info("leaving %s: %s", alloc_address, error)
        return False
    return True
