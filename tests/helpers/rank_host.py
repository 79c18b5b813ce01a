"""One rank's cache of a case of `contract_cases` and its endpoint, in this process or a child.

Also the program of a child (``python rank_host.py``), which talks as `peer_host.py` does.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from cache_content import GUARD_BYTES, Bytes, private_array
from contract_cases import CASES
from kv_oracle import compare
from peer_host import serve
from reshard_cases import Case

from kvxfer import Endpoint, KVCache, shared_empty

_GUARD = 0x5A


@dataclass
class _Guarded:
    raw: Bytes

    @property
    def inner(self) -> Bytes:
        return self.raw[GUARD_BYTES:-GUARD_BYTES]

    def guard_written(self) -> bool:
        ends = (self.raw[:GUARD_BYTES], self.raw[-GUARD_BYTES:])
        return any(bool((end != _GUARD).any()) for end in ends)


class RankHost:
    """A source or destination rank: memory with guards, and the endpoint that serves it."""

    case: Case
    memory: _Guarded
    cache: KVCache
    endpoint: Endpoint

    def open(
        self, *, case: str, is_source: bool, rank: int, memory: str, transport: str
    ) -> dict[str, Any]:
        """Make the rank's memory as it is before the transfer, register it and serve it."""
        self.case = CASES[case]
        self._side = self.case.src if is_source else self.case.dst
        self._is_source, self._rank = is_source, rank
        content = self._content()
        self.memory = _Guarded(self._allocate(memory, content.size + 2 * GUARD_BYTES))
        self.memory.raw[:] = _GUARD
        self.memory.inner[:] = content
        shard = self._side.shard(rank)
        # Several regions where the layout allows it: one a layer.
        num_arrays = shard.layout.num_layers if shard.layout.axes[0] == "layer" else 1
        arrays = self._arrays(num_arrays)
        self.cache = KVCache(self._side.layout, arrays, rank=shard.rank)
        self.endpoint = Endpoint(self.cache, transport=transport, num_threads=2)
        return {"addresses": self.endpoint.addresses}

    def _allocate(self, memory: str, num_bytes: int) -> Bytes:
        allocate = shared_empty if memory == "shared" else private_array
        array: Bytes = allocate(num_bytes)
        return array

    def _arrays(self, num_arrays: int) -> Any:
        """What lies between the guards, to register."""
        return np.split(self.memory.inner, num_arrays)

    def close(self) -> None:
        """Give everything back."""
        for name in ("endpoint", "cache"):
            # Either may be missing, where opening failed.
            if hasattr(self, name):
                getattr(self, name).close()
                delattr(self, name)

    def problem(self) -> str:
        """Where the memory is not as it should be after the transfer; empty if nowhere."""
        if self.memory.guard_written():
            return "a guard was written"
        expected = self._content() if self._is_source else self.case.expected_bytes(self._rank)
        try:
            compare(self._side.caches[self._rank], self.memory.inner, expected)
        except AssertionError as error:
            return str(error)
        return ""

    def wait(self, connection: str, sequence: int) -> bool:
        """Whether a peer's transfer is said to be complete."""
        return self.endpoint.wait(connection, sequence, timeout_s=0.0)

    def _content(self) -> Bytes:
        if self._is_source:
            return self.case.source_bytes(self._rank)
        return self.case.destination_bytes(self._rank)


if __name__ == "__main__":
    serve(RankHost())
