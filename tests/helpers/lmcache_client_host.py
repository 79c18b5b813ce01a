"""A process with clients of LMCache's multiprocess servers, those of its own benchmark."""

import time
from typing import Any

import lmcache_host
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

NUM_TOKENS = 1024
_SHAPE = "(2,256,16,2,64):bfloat16:4"  # planes, blocks, tokens a block, heads, head size; layers
_POLL_S = 0.1


class ClientHost:
    """A client a server, each with a paged cache of its own; all caches have one content."""

    def __init__(self) -> None:
        self._clients: dict[str, Any] = {}
        self._num_requests = 0

    def open(self, *, url: str) -> None:
        config = BenchConfig(
            rpc_url=url, http_url="", mode="cpu", transfer_mode="engine_driven", tp_size=1,
            use_mla=False, num_tokens=NUM_TOKENS - 1, kvcache_shape_spec=_SHAPE, num_blocks=256,
            block_size=16,
        )  # fmt: skip
        self._clients[url] = ServerBenchClient(config, lambda _: None)
        self._clients[url].start()

    def store(self, *, url: str, number: int) -> bool:
        """Store all chunks of a request of that number."""
        client, request = self._request(url, number)
        done = client.store(request, 0, request.num_full_tokens)
        client.end_session(request)
        return bool(done.succeeded)

    def hits(self, *, url: str, number: int, wanted: int, timeout_s: float = 20.0) -> int:
        """Chunks of a request that are found; asked again until they are ``wanted``, or in vain."""
        deadline = time.monotonic() + timeout_s
        while True:
            client, request = self._request(url, number)
            found = client.lookup(request)
            if found.hit_chunks:
                # What was locked for a reader is freed by it.
                client.retrieve(request, 0, found.hit_chunks * request.chunk_size)
            client.end_session(request)
            if found.hit_chunks == wanted or time.monotonic() > deadline:
                return int(found.hit_chunks)
            time.sleep(_POLL_S)

    def retrieve(self, *, url: str, number: int) -> str:
        """Retrieve a request over zeros; ``right`` where every chunk is as it was stored."""
        client, request = self._request(url, number)
        count = request.num_full_tokens
        expected = client.compute_checksums(request, 0, count)
        client.zero_destination(request, 0, count)
        zeros = client.compute_checksums(request, 0, count)
        found = client.lookup(request)
        if not found.is_full_hit:
            return f"{found.hit_chunks} of {found.total_chunks} chunks are found"
        client.retrieve(request, 0, count)
        client.end_session(request)
        came = client.compute_checksums(request, 0, count)
        return "right" if came == expected != zeros else "wrong"

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _request(self, url: str, number: int) -> tuple[Any, Any]:
        self._num_requests += 1
        client = self._clients[url]
        return client, client.create_request(number, f"request-{self._num_requests}", "test")


if __name__ == "__main__":
    lmcache_host.run(ClientHost())
