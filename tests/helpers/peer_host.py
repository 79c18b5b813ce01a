"""One cache and its endpoint, driven by name: in this process, or as a child over JSON lines.

As a child (``python peer_host.py``) it reads ``{"call": name, "args": {...}}`` on standard input
and answers ``{"result": ...}`` or ``{"error": class, "message": text}``, one line each. A call that
is to be raced against first writes ``{"ready": true}``. It ends when its input does.
"""

import base64
import json
import sys
from collections.abc import Callable
from typing import Any

import leaks
import numpy as np
from cache_content import GUARD_BYTES, Bytes, CacheShape, private_array

from kvxfer import Endpoint, KVCache, KVLayout, shared_empty


class PeerHost:
    """A cache in memory with guards, and the endpoint that serves it."""

    def __init__(self) -> None:
        self.shape: CacheShape
        self.cache: KVCache
        self.endpoint: Endpoint
        self._raw: list[Bytes] = []

    def open(
        self,
        *,
        layout: dict[str, Any],
        num_blocks: int,
        num_arrays: int,
        memory: str,
        transport: str,
        seed: int,
        ports: dict[str, int] | None = None,
        bind_host: str = "127.0.0.1",
    ) -> dict[str, Any]:
        """Make the memory, fill it, register it and serve it."""
        self.shape = shape = CacheShape(tuple(layout.items()), num_blocks, num_arrays)
        allocate = shared_empty if memory == "shared" else private_array
        self._raw = [allocate(shape.raw_bytes) for _ in range(num_arrays)]
        self.fill(seed)
        inner = [raw[GUARD_BYTES : GUARD_BYTES + shape.array_bytes] for raw in self._raw]
        self.cache = KVCache(KVLayout(**layout), inner)
        self.endpoint = Endpoint(
            self.cache, transport=transport, num_threads=2, ports=ports, bind_host=bind_host
        )
        return {
            "addresses": self.endpoint.addresses,
            "incarnation": self.endpoint.incarnation,
        }

    def close(self) -> None:
        """Give everything back."""
        for name in ("endpoint", "cache"):
            # Either may be missing, where opening failed.
            if hasattr(self, name):
                getattr(self, name).close()
                delattr(self, name)
        self._raw = []

    def close_cache(self) -> None:
        """Close the registrations while the endpoint still serves."""
        self.cache.close()

    def close_endpoint(self) -> None:
        """Stop serving while the memory stays."""
        self.endpoint.close()

    def fill(self, seed: int) -> None:
        """Write the bytes of ``seed`` over pages and guards."""
        for raw, row in zip(self._raw, self.shape.content(seed), strict=True):
            raw[:] = row

    def content(self) -> Bytes:
        """Pages and guards as they are now."""
        return np.stack(self._raw)

    def encoded_content(self) -> str:
        """The same, for a JSON line."""
        return base64.b64encode(self.content().tobytes()).decode()

    def num_free(self) -> int:
        """Blocks that the pool can still grant."""
        return self.endpoint.blocks.num_free

    def release(self, connection: str, request_id: str) -> None:
        """Free a request's blocks, as this side's engine does."""
        self.endpoint.blocks.release(connection, request_id)

    def resources(self) -> dict[str, int]:
        """What this process holds."""
        return leaks.resources()

    def private_bytes(self) -> int:
        """Resident memory of this process's own."""
        return leaks.private_bytes()

    def stamp(self, round_number: int, block_ids: list[int]) -> None:
        """Write words that tell round, plane, block and place apart."""
        for plane, pages in enumerate(self._planes()):
            for block in block_ids:
                pages[block] = self._stamped(round_number, plane, block)

    def wait(self, incarnation: str, sequence: int, timeout_s: float) -> bool:
        """Wait for a peer's transfer."""
        return self.endpoint.wait(incarnation, sequence, timeout_s=timeout_s)

    def expect(
        self,
        *,
        incarnation: str,
        sequence: int,
        round_number: int,
        src_block_ids: list[int],
        dst_block_ids: list[int],
        timeout_s: float,
        announce: Callable[[], None],
    ) -> dict[str, Any]:
        """Wait for a transfer and at once compare its blocks with what their source was stamped."""
        planes = self._planes()
        wanted = [
            [self._stamped(round_number, plane, block) for block in src_block_ids]
            for plane in range(len(planes))
        ]
        announce()
        signalled = self.endpoint.wait(incarnation, sequence, timeout_s=timeout_s)
        num_stale = 0
        # The end of the last plane is what a copy in order writes last.
        for plane in reversed(range(len(planes))):
            for index in reversed(range(len(dst_block_ids))):
                found = planes[plane][dst_block_ids[index]]
                num_stale += not np.array_equal(found, wanted[plane][index])
        return {"signalled": signalled, "num_stale": num_stale}

    def _planes(self) -> list[Any]:
        """Each plane as uint64 ``[num_blocks, words]`` in the live memory."""
        shape = self.shape
        inner = [raw[GUARD_BYTES : GUARD_BYTES + shape.array_bytes] for raw in self._raw]
        words = [
            one.view(np.uint64).reshape(-1, shape.num_blocks, shape.page_bytes // 8)
            for one in inner
        ]
        return [plane for array in words for plane in array]

    def _stamped(self, round_number: int, plane: int, block: int) -> Any:
        first = (round_number << 44) | (plane << 36) | (block << 20)
        return np.arange(first, first + self.shape.page_bytes // 8, dtype=np.uint64)


def _answer(host: Any, request: dict[str, Any]) -> dict[str, Any]:
    args = dict(request["args"])
    if request["call"] == "expect":
        args["announce"] = lambda: _write({"ready": True})
    try:
        return {"result": getattr(host, request["call"])(**args)}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}


def _write(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def serve(host: Any) -> None:
    """Answer calls of the methods of ``host`` until the input ends."""
    for line in sys.stdin:
        _write(_answer(host, json.loads(line)))
    host.close()


if __name__ == "__main__":
    serve(PeerHost())
