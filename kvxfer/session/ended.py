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

    def add(self, request_id: str, reason: str, writers: Iterable[str]) -> None:
        """A request of these connections was committed or, with a reason, failed."""
        self._ended[request_id] = (reason, frozenset(writers))
        if len(self._ended) > _MAX_KEPT:
            self._ended.popitem(last=False)

    def add_abort(self, request_id: str, reason: str) -> None:
        """A rank took back what it had not reserved: the request will never be whole.

        For its other ranks that is the end too, also where the abort overtakes what they ask. How a
        request has ended already stays as it is.
        """
        if request_id not in self._ended:
            self.add(request_id, reason, ())

    def refusal(self, request_id: str) -> str:
        """Why nobody may begin a request of that name; empty where one may."""
        if request_id not in self._ended:
            return ""
        return ended_text(request_id, self._ended[request_id][0])

    def commit(self, request: CommitRequest) -> None:
        """Take a commit that was heard before.

        Raises:
            TransferFailed: the request has failed, and why.
            InvalidUsage: the connection never held it.
        """
        reason, writers = self._ended.get(request.request_id, ("", frozenset()))
        if reason:
            raise TransferFailed(ended_text(request.request_id, reason))
        if request.incarnation not in writers:
            raise InvalidUsage(
                f"request {request.request_id!r} holds no blocks of this sender; reserve them first"
            )


def ended_text(request_id: str, reason: str) -> str:
    """How a request ended, for whoever comes too late."""
    if reason:
        return f"request {request_id!r} has failed: {reason}; use a new id"
    return f"request {request_id!r} is committed already; use a new id"
