"""The endpoint of a pool, and whom it lets in: without a key, whoever reaches it."""

import logging
from collections.abc import Callable

from kvxfer.connectors.lmcache.pool import PagePool
from kvxfer.control import SharedKey
from kvxfer.control.addresses import is_loopback, resolve_host
from kvxfer.session import Endpoint
from kvxfer.session.requests import Requests, Writers

_log = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"


def serve(
    pool: PagePool,
    host: str,
    *,
    key_file: str | None = None,
    advertise_host: str | None = None,
    transport: str = "auto",
    num_threads: int | None = None,
    requests: Callable[[Writers], Requests] | None = None,
) -> Endpoint:
    """Serve ``pool`` at ``host``, beyond loopback without a key too, as LMCache's own channels do.

    Args:
        pool: whose pages peers may reach.
        host: address of both channels.
        key_file: lets in those alone who hold the same key; None = everybody.
        advertise_host: what peers dial where ``host`` is beyond loopback; None = ``host``.
        transport: see :class:`Endpoint`, as are the others.
        num_threads: threads of host copies.
        requests: what answers the alloc channel.

    Raises:
        InvalidUsage: an unusable host, setting or key file.
        NotAvailable: no transport works here.
    """
    key = None if key_file is None else SharedKey.read(key_file)
    is_beyond = not is_loopback(resolve_host(host))
    is_open = is_beyond and key is None
    if is_open:
        _log.warning(
            "whoever reaches %s may read and write the pool that is served there; give all sides "
            "one key_file, or let trusted hosts alone reach it",
            host,
        )
    return Endpoint(
        pool.cache,
        transport=transport,
        num_threads=num_threads,
        bind_host=host,
        advertise_host=advertise_host if is_beyond else None,
        key=key,
        insecure=is_open,
        requests=requests,
    )
