"""What an accelerated agent hands out in the place of NIXL's handles.

Both are subclasses of NIXL's own and hold a native handle, so that whatever of NIXL takes one takes
these. That of a transfer is made when somebody asks for it, as `estimate_xfer_cost` does.
"""

from collections.abc import Callable
from typing import Any

from kvxfer.connectors.nixl_agent.lanes import Copy, Job, Lane
from kvxfer.connectors.nixl_agent.pairing import ListSide
from kvxfer.connectors.nixl_agent.remote_agent import RemoteAgent
from kvxfer.transport.nixl.api import load_api

_api: Any = load_api()


class ListHandle(_api.nixl_prepped_dlist_handle):  # type: ignore[misc]
    """NIXL's handle of a prepared list, and the list itself.

    Attributes:
        side: the descriptors; None where transfers of them are NIXL's, for the reason ``why``.
    """

    def __init__(self, stock: Any, side: ListSide | None, why: str) -> None:
        super().__init__(stock._agent, stock._handle)
        stock._released = True  # this one releases it
        self.side, self.why = side, why


class TransferHandle(_api.nixl_xfer_handle):  # type: ignore[misc]
    """A transfer that kvxfer carries. It may be posted again once it has ended.

    Attributes:
        copy: what is copied.
        lane: what carries it.
        peer: with whom.
        message: what the peer is told afterwards; empty = nothing.
        job: the last posting.
    """

    def __init__(
        self,
        *,
        agent: Any,
        copy: Copy,
        lane: Lane,
        peer: RemoteAgent,
        num_descs: int,
        message: bytes,
        make_stock: Callable[[], Any],
    ) -> None:
        self._agent, self._released = agent, False
        self.copy, self.lane, self.peer, self.message = copy, lane, peer, message
        self.num_descs = num_descs
        self.job: Job | None = None
        self._make_stock: Callable[[], Any] | None = make_stock
        self._stock: Any = None

    @property
    def _handle(self) -> int:
        """NIXL's own handle of the same transfer."""
        self.require_held()
        if self._stock is None and self._make_stock is not None:
            self._stock = self._make_stock()
        return int(self._stock._handle)

    @property
    def is_active(self) -> bool:
        """Whether it was posted and has not ended."""
        return self.job is not None and self.job.state == "PROC"

    def require_held(self) -> None:
        """Check that it was not released.

        Raises:
            nixlInvalidParamError: it was.
        """
        if self._released:
            raise _api.nixlBind.nixlInvalidParamError("the transfer handle was released")

    def release(self) -> None:
        """Give it up; a posting that waits is cancelled.

        Raises:
            nixlBackendError: it is being copied and cannot be cancelled; nothing is released.
        """
        if self._released:
            return
        if self.job is not None and self.is_active and not self.job.cancel():
            raise _api.nixlBind.nixlBackendError(
                "the transfer is being copied; release it again once it has ended"
            )
        if self._stock is not None:
            self._stock.release()
        self._released = True
        self._make_stock = None

    def __repr__(self) -> str:
        return f"TransferHandle({self.copy.num_bytes} bytes, released={self._released})"

    def __del__(self) -> None:
        """Nothing: a copy in flight is held by its lane, and NIXL's handle releases itself."""
