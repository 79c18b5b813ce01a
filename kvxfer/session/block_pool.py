"""Which blocks of a cache are free, reserved or committed."""

import threading
from collections import deque

from kvxfer.errors import InvalidUsage


class BlockPool:
    """Blocks of one cache for requests by id. Thread-safe.

    A reservation is all or nothing, so two requests can never wait for each other's half. Blocks
    are handed out in the order in which they came free.
    """

    def __init__(self, num_blocks: int) -> None:
        """All of ``num_blocks`` are free."""
        self._free = deque(range(num_blocks))
        self._num_blocks = num_blocks
        self._held: dict[str, list[int]] = {}
        self._committed: set[str] = set()
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return len(self._free)

    def reserve(self, request_id: str, num_blocks: int) -> list[int] | None:
        """Blocks for a request, the same ones when it asks again; None while too few are free.

        Raises:
            InvalidUsage: the request holds another number of blocks, or wants more than the pool
                has.
        """
        with self._lock:
            held = self._held.get(request_id)
            if held is not None and len(held) == num_blocks:
                return held
            if held is not None:
                raise InvalidUsage(
                    f"request {request_id!r} already holds {len(held)} blocks and wants "
                    f"{num_blocks}; use a new id, or abort it first"
                )
            if num_blocks > self._num_blocks:
                raise InvalidUsage(
                    f"request {request_id!r} wants {num_blocks} blocks of a pool of "
                    f"{self._num_blocks}; it can never be served"
                )
            if num_blocks > len(self._free):
                return None
            blocks = [self._free.popleft() for _ in range(num_blocks)]
            self._held[request_id] = blocks
            return blocks

    def commit(self, request_id: str) -> list[int]:
        """Mark a request's blocks as filled; they stay its own until :meth:`release`."""
        with self._lock:
            blocks = self._blocks_of(request_id)
            self._committed.add(request_id)
            return blocks

    def release(self, request_id: str) -> None:
        """Free the blocks of a request, committed or not; again, or of none, changes nothing."""
        with self._lock:
            self._free.extend(self._held.pop(request_id, []))
            self._committed.discard(request_id)

    def _blocks_of(self, request_id: str) -> list[int]:
        blocks = self._held.get(request_id)
        if blocks is None:
            raise InvalidUsage(f"request {request_id!r} holds no blocks; reserve them first")
        return blocks
