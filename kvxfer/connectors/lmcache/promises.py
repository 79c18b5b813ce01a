"""What `arrivals` keeps of a request that asked for pages, and of what it was promised."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvxfer.connectors.lmcache.wire import AllocRequest, AllocResponse, CancelNotif, Grant


@dataclass(slots=True, eq=False)
class Request:
    """What one sender has under one request id."""

    owner: tuple[str, str]
    connection: str
    promised: int  # pages that later batches may still ask for
    asked_s: float = 0.0  # time.monotonic() of its last batch
    keys: list[str] = field(default_factory=list)  # hits that count for it
    grants: set[str] = field(default_factory=set)
    is_complete: bool = False  # the last batch was granted
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class Granted:
    """Pages that the sender of a request may be writing."""

    request: Request
    pages: list[tuple[str, Any]]
    at_s: float


@dataclass(slots=True, eq=False)
class Waiting:
    """A batch that has no answer yet."""

    sender: str
    message: AllocRequest
    reply: Callable[[AllocResponse], None]
    limit_s: float
    asked_s: float = field(default_factory=time.monotonic)


def owner_of(sender: str, message: AllocRequest | CancelNotif) -> tuple[str, str]:
    """Ids of requests are of their senders: two proxies may count alike."""
    of = sender if message.kvxfer is None else message.kvxfer.connection
    return of, message.req_id


def refused(message: AllocRequest, reason: str) -> AllocResponse:
    """No page for any key, and why."""
    return AllocResponse(
        remote_indexes=[-1] * len(message.keys),
        kvxfer=None if message.kvxfer is None else Grant(error=reason[:4096]),
    )
