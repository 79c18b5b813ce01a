"""A cache with a `Receiver` or a `Sender` on it, driven by name: in this process, or as a child.

As a child (``python session_host.py``) it talks as `peer_host.py` does.
"""

import base64
from dataclasses import replace
from typing import Any

import leaks
import numpy as np
from cache_content import GUARD_BYTES, Bytes, CacheShape, private_array
from peer_host import serve

from kvxfer import KVCache, KVLayout, shared_empty
from kvxfer.layout import TPLayout
from kvxfer.session import (
    Deferred,
    Notice,
    ReceiveLimits,
    Receiver,
    Refused,
    Sender,
    SendHandle,
    SendLimits,
)


class SessionHost:
    """A cache in memory with guards, and one side of sessions over it."""

    def __init__(self) -> None:
        self.shape: CacheShape
        self._raw: list[Bytes] = []
        self.handles: dict[str, SendHandle] = {}
        self.freed: list[tuple[str, tuple[int, ...]]] = []
        self.deferred: dict[str, Deferred] = {}

    def open(
        self,
        *,
        role: str,
        layout: dict[str, Any],
        num_blocks: int,
        num_arrays: int = 1,
        memory: str = "shared",
        transport: str = "shm",
        seed: int,
        rank: dict[str, int] | None = None,
        ports: dict[str, int] | None = None,
        limits: dict[str, Any] | None = None,
        scheduler: str = "",
    ) -> dict[str, Any]:
        """Make the memory, fill it, and open ``role`` (receiver or sender) on it."""
        self.shape = shape = CacheShape(tuple(layout.items()), num_blocks, num_arrays)
        allocate = shared_empty if memory == "shared" else private_array
        self._raw = [allocate(shape.raw_bytes) for _ in range(num_arrays)]
        self.fill(seed)
        inner = [raw[GUARD_BYTES : GUARD_BYTES + shape.array_bytes] for raw in self._raw]
        self.cache = KVCache(KVLayout(**layout), inner, rank=TPLayout(**(rank or {})))
        if role == "sender":
            self.sender = Sender(
                self.cache, transport=transport, num_threads=2, limits=SendLimits(**(limits or {}))
            )
            return {"incarnation": self.sender.incarnation}
        self.receiver = Receiver(
            self.cache,
            transport=transport,
            num_threads=2,
            ports=ports,
            limits=ReceiveLimits(**(limits or {})),
            on_reserve=getattr(self, f"_{scheduler}") if scheduler else None,
            on_free=lambda request_id, block_ids: self.freed.append((request_id, block_ids)),
        )
        return {"addresses": dict(self.receiver.addresses)}

    def close(self) -> None:
        """Give everything back."""
        for name in ("sender", "receiver", "cache"):
            if hasattr(self, name):
                getattr(self, name).close()
                delattr(self, name)
        self._raw = []
        self.handles.clear()

    def resources(self) -> dict[str, int]:
        """What this process holds."""
        return leaks.resources()

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

    def limit(self, **limits: float) -> None:
        """Change limits of the requests that begin from now on."""
        side = self.sender if hasattr(self, "sender") else self.receiver._book
        side._limits = replace(side._limits, **limits)  # type: ignore[type-var]

    # A sender.

    def send(self, request_id: str, block_ids: list[int], to: Any, tokens: Any = None) -> None:
        """Begin to send."""
        self.handles[request_id] = self.sender.send(
            request_id, block_ids, to=to, tokens=None if tokens is None else range(*tokens)
        )

    def send_layers(self, request_id: str, block_ids: list[int], to: Any) -> None:
        """Begin to send layer by layer."""
        self.handles[request_id] = self.sender.send_layers(request_id, block_ids, to=to)

    def layer(self, request_id: str, layer: int) -> None:
        """A layer is ready."""
        self.handles[request_id].layer(layer)

    def cancel(self, request_id: str) -> None:
        """Give a request up."""
        self.handles[request_id].cancel()

    def wait(self, request_id: str, timeout_s: float = 20.0) -> int:
        """Wait for the end; returns the bytes that were sent."""
        handle = self.handles[request_id]
        handle.wait(timeout_s)
        return handle.num_bytes

    def done(self, request_id: str) -> bool:
        """Whether it has ended."""
        return self.handles[request_id].done

    # A receiver.

    def notice(self, timeout_s: float = 20.0) -> dict[str, Any] | None:
        """The next notice."""
        found = self.receiver.poll(timeout_s)
        return None if found is None else plain(found)

    def abort(self, request_id: str) -> None:
        """The engine gives a request up."""
        self.receiver.abort(request_id, "the engine gave it up")

    def release(self, request_id: str) -> None:
        """The engine is done with a request's blocks."""
        self.receiver.release(request_id)

    def num_free(self) -> int:
        """Blocks of the pool that nobody holds."""
        return self.receiver.num_free_blocks

    def num_open(self) -> int:
        """Requests that have not ended, or are in quarantine."""
        return self.receiver.num_open

    def close_cache(self) -> None:
        """Close the registrations while the receiver still serves."""
        self.cache.close()

    def grant(self, request_id: str, block_ids: list[int], first_token: int = 0) -> bool:
        """The scheduler has placed a request."""
        return self.deferred[request_id].grant(block_ids, first_token)

    def _later(self, offer: Any) -> Deferred:
        answer = self.deferred[offer.request_id] = Deferred()
        return answer

    def _first(self, offer: Any) -> list[int]:
        return list(range(offer.num_blocks))

    def _never(self, offer: Any) -> Refused:
        return Refused("no room for strangers")

    def _breaks(self, offer: Any) -> list[int]:
        raise ValueError("a fault of the scheduler")


def plain(notice: Notice) -> dict[str, Any]:
    """A notice as it travels over JSON."""
    return {
        "request_id": notice.request_id,
        "ok": notice.ok,
        "block_ids": list(notice.block_ids),
        "failed_block_ids": list(notice.failed_block_ids),
        "first_token": notice.first_token,
        "reason": notice.reason,
        "quarantined": notice.quarantined,
    }


if __name__ == "__main__":
    serve(SessionHost())
