"""Which blocks of a cache are free, reserved or committed."""

import threading
from collections import deque

from kvxfer.errors import InvalidUsage

_Key = tuple[str, str]


class BlockPool:
    """Blocks of one cache for requests by connection and id. Thread-safe.

    A reservation is all or nothing, so two requests can never wait for each other's half. Blocks
    are handed out in the order in which they came free. Equal ids of two connections
    (:attr:`kvxfer.Peer.connection`) are two requests.
    """

    def __init__(self, num_blocks: int) -> None:
        """All of ``num_blocks`` are free."""
        self._free = deque(range(num_blocks))
        self._num_blocks = num_blocks
        self._held: dict[_Key, list[int]] = {}
        self._committed: set[_Key] = set()
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return len(self._free)

    def reserve(self, connection: str, request_id: str, num_blocks: int) -> list[int] | None:
        """Blocks for a request, the same ones when it asks again; None while too few are free.

        Raises:
            InvalidUsage: the request is committed, holds another number of blocks, or wants more
                than the pool has.
        """
        key = (connection, request_id)
        with self._lock:
            held = self._held.get(key)
            if key in self._committed:
                raise InvalidUsage(
                    f"request {request_id!r} is committed and its blocks are in use; use a new id"
                )
            if held is not None and len(held) == num_blocks:
                return list(held)
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
            self._held[key] = blocks
            return list(blocks)

    def commit(self, connection: str, request_id: str) -> list[int]:
        """Mark a request's blocks as filled: from now on only :meth:`release` frees them."""
        key = (connection, request_id)
        with self._lock:
            blocks = self._held.get(key)
            if blocks is None:
                raise InvalidUsage(f"request {request_id!r} holds no blocks; reserve them first")
            self._committed.add(key)
            return list(blocks)

    def abort(self, connection: str, request_id: str) -> None:
        """The peer gives a request up: frees its blocks, unless they are committed.

        Again, or of a request that holds nothing, it changes nothing.
        """
        with self._lock:
            if (connection, request_id) not in self._committed:
                self._free_blocks_of((connection, request_id))

    def abandon(self, connection: str) -> None:
        """A connection writes no more: frees what it has reserved and not committed."""
        with self._lock:
            for key in [key for key in self._held if key[0] == connection]:
                if key not in self._committed:
                    self._free_blocks_of(key)

    def release(self, connection: str, request_id: str) -> None:
        """The engine is done with a request: frees its blocks, committed or not.

        Again, or of a request that holds nothing, it changes nothing.
        """
        with self._lock:
            self._free_blocks_of((connection, request_id))

    def _free_blocks_of(self, key: _Key) -> None:
        self._free.extend(self._held.pop(key, []))
        self._committed.discard(key)
