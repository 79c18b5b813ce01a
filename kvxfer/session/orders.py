"""What a caller asks of a sender, judged in the caller's own thread: the sender's serves others."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TypeAlias

from kvxfer.control.addresses import parse_url, resolve_host
from kvxfer.control.messages import MAX_REQUEST_ID_CHARS
from kvxfer.errors import InvalidUsage
from kvxfer.session.meeting import require_addresses

Addresses: TypeAlias = Mapping[str, str]


def require_request_id(request_id: str) -> None:
    """Check that a receiver can be told the name.

    Raises:
        InvalidUsage: it is no text, empty, too long, or not to be encoded.
    """
    if (
        not isinstance(request_id, str)
        or not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS
        or not _is_unicode(request_id)
    ):
        raise InvalidUsage(
            f"request id {request_id!r:.80} ({type(request_id).__name__}); use a str of 1 to "
            f"{MAX_REQUEST_ID_CHARS} characters, none of them a lone surrogate"
        )


def looked_up(to: Addresses | Sequence[Addresses]) -> list[Addresses]:
    """Numeric addresses of every rank of ``to``, for which each name is looked up once.

    So both channels of a name with several addresses are at the same one.

    Raises:
        InvalidUsage: no ranks, one twice, or one whose addresses are missing or malformed.
        NotAvailable: a host has no address.
    """
    find = cache(resolve_host)
    given = [to] if isinstance(to, Mapping) or not isinstance(to, Iterable) else list(to)
    ranks: list[Addresses] = []
    for one in given:
        if not isinstance(one, Mapping):
            raise InvalidUsage(f"{one!r:.80} is no rank; pass the `addresses` of its receiver")
        ranks.append({channel: parse_url(url, find).url for channel, url in one.items()})
        require_addresses(ranks[-1])
    if len({(one["init"], one["alloc"]) for one in ranks}) != len(ranks) or not ranks:
        raise InvalidUsage(f"{len(ranks)} ranks, none of them twice; pass at least one")
    return ranks


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
