"""What a receiver remembers of requests that have ended."""

from collections import OrderedDict
from collections.abc import Iterable

from kvxfer.control import CommitRequest
from kvxfer.errors import InvalidUsage, TransferFailed

_MAX_KEPT = 1 << 16


class EndedRequests:
    """Ids that were used, bounded; the oldest are forgotten first."""

    def __init__(self) -> None:
        """None yet."""
        self._ended: OrderedDict[str, tuple[str, frozenset[str]]] = OrderedDict()
        # An abort may overtake the reservation that it takes back.
        self._aborted: OrderedDict[tuple[str, str], None] = OrderedDict()

    def add(self, request_id: str, reason: str, writers: Iterable[str]) -> None:
        """A request of these connections was committed or, with a reason, failed."""
        self._ended[request_id] = (reason, frozenset(writers))
        if len(self._ended) > _MAX_KEPT:
            self._ended.popitem(last=False)

    def add_abort(self, connection: str, request_id: str) -> None:
        """A connection took back what it had not reserved."""
        self._aborted[connection, request_id] = None
        if len(self._aborted) > _MAX_KEPT:
            self._aborted.popitem(last=False)

    def refusal(self, connection: str, request_id: str) -> str:
        """Why a connection may not begin a request of that name; empty where it may."""
        if request_id in self._ended:
            return ended_text(request_id, self._ended[request_id][0])
        if (connection, request_id) in self._aborted:
            return f"request {request_id!r} was aborted by its sender before; use a new id"
        return ""

    def commit(self, request: CommitRequest) -> None:
        """Take a commit that was heard before.

        Raises:
            TransferFailed: the request has failed, and why.
            InvalidUsage: the connection never held it.
        """
        reason, writers = self._ended.get(request.request_id, ("", frozenset()))
        if request.incarnation not in writers:
            raise InvalidUsage(
                f"request {request.request_id!r} holds no blocks of this sender; reserve them first"
            )
        if reason:
            raise TransferFailed(ended_text(request.request_id, reason))


def ended_text(request_id: str, reason: str) -> str:
    """How a request ended, for whoever comes too late."""
    if reason:
        return f"request {request_id!r} has failed: {reason}; use a new id"
    return f"request {request_id!r} is committed already; use a new id"
