"""LMCache's prefill and decode on its own channel and on kvxfer's, with chunks of 32 MiB.

A sending and a receiving engine have a process each, on the first and the second GPU, or both on
the only one, or in host memory. A round stores one request, whose pages are filled anew, and ends
with what LMCache tells its proxy, from which on a decoder may start: `hand_over_ms`. `gb_per_s` is
of the channel's writes alone, and `of_limit` that over one contiguous copy of as many bytes. After
each round the receiver takes the request back and compares every byte.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Final

import pytest

KV_SHAPE: Final = (32, 2, 256, 8, 128)
"""Of a chunk: layers, K and V, tokens, heads, elements; llama-3.1-8b's, 32 MiB in bfloat16."""
CHUNK_TOKENS: Final = KV_SHAPE[2]
CHUNK_BYTES: Final = 32 << 20
NUM_CHUNKS: Final = {"cpu": 8, "cuda": 32}
ROUNDS: Final = 9
DEADLINE_S: Final = 120.0
LOOPBACK: Final = "127.0.0.1"
_NUM_PLACES: Final = 4099  # a prime, so that no step between chunks returns to few of them


class Engine:
    """One of LMCache's engines, and the pages that it is asked for."""

    def __init__(self, role: str, channel: str, device: str, ports: dict[str, int]) -> None:
        from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from torch import bfloat16

        from kvxfer.connectors.lmcache import install

        install()
        self.device, self.ports = device, ports
        self.content = content_of(device)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS, local_cpu=False, max_local_cpu_size=0.0,
            enable_pd=True, pd_role=role, pd_backend_mode="sync",
            pd_buffer_size=NUM_CHUNKS[device] * CHUNK_BYTES, pd_buffer_device=device,
            transfer_channel=channel, nixl_backends=["UCX"], lmcache_instance_id=role,
            extra_config={"kvxfer.peers": "kvxfer"},  # so that it needs no NIXL
            pd_peer_host=LOOPBACK, pd_peer_init_port=[ports["init"]],
            pd_peer_alloc_port=[ports["alloc"]],
            pd_proxy_host=LOOPBACK, pd_proxy_port=ports["proxy"],
        )  # fmt: skip
        self.engine: Any = LMCacheEngineBuilder.get_or_create(
            role,
            config,
            LMCacheMetadata("m", 1, 1, 0, 0, bfloat16, KV_SHAPE, role="worker"),
            self.content,
            mock_up_broadcast_fn,
            mock_up_broadcast_object_fn,
        )
        self.engine.post_init()

    def tokens(self, number: int) -> list[int]:
        """Of a request; its first chunk is no other's."""
        return [number, *range(NUM_CHUNKS[self.device] * CHUNK_TOKENS - 1)]


class Receiver(Engine):
    """Says how many bytes of a request came, and how many of them are wrong."""

    def __init__(self, channel: str, device: str, ports: dict[str, int]) -> None:
        super().__init__("receiver", channel, device, ports)

    def answer(self, number: int) -> dict[str, Any]:
        """Take a request back."""
        self.content.num_read = self.content.num_wrong = 0
        self.engine.retrieve(self.tokens(number), seed=number)
        return {"bytes": self.content.num_read, "wrong": self.content.num_wrong}


class Sender(Engine):
    """Stores requests, and says how long that took."""

    def __init__(self, channel: str, device: str, ports: dict[str, int]) -> None:
        import zmq

        self._notices = zmq.Context().socket(zmq.PULL)
        self._notices.bind(f"tcp://{LOOPBACK}:{ports['proxy']}")
        super().__init__("sender", channel, device, ports)
        self._written_s: list[float] = []
        self._time_writes(self.engine.storage_manager.storage_backends["PDBackend"])

    def _time_writes(self, backend: Any) -> None:
        write = backend.transfer_channel.batched_write

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            done = write(*args, **kwargs)
            self._written_s.append(time.perf_counter() - began)
            return done

        backend.transfer_channel.batched_write = timed

    def answer(self, number: int) -> dict[str, Any]:
        """Store a request; it is over there once the proxy is told."""
        spec = SimpleNamespace(
            req_id=f"r{number}", receiver_host=LOOPBACK, is_last_prefill=True,
            receiver_init_port=[self.ports["init"]], receiver_alloc_port=[self.ports["alloc"]],
            receiver_query_port=None, total_chunks=NUM_CHUNKS[self.device],
        )  # fmt: skip
        self._written_s.clear()
        began = time.perf_counter()
        self.engine.store(self.tokens(number), transfer_spec=spec, req_id=spec.req_id, seed=number)
        if not self._notices.poll(int(DEADLINE_S * 1e3)):
            raise TimeoutError(f"request {number} was not over there within {DEADLINE_S:g} s")
        hand_over_s = time.perf_counter() - began
        self._notices.recv()
        return {"hand_over_s": hand_over_s, "written_s": sum(self._written_s)}


def content_of(device: str) -> Any:
    """In place of a paged cache: fills pages with bytes of a seed, and checks those that come."""
    import torch
    from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector

    class Content(MockGPUConnector):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(KV_SHAPE)
            self.num_wrong = self.num_read = 0
            # Each chunk is a window of it, at a place of its own.
            self._bytes = torch.randint(
                0, 256, (CHUNK_BYTES + _NUM_PLACES,), dtype=torch.uint8,
                generator=torch.Generator().manual_seed(0),
            ).to(device)  # fmt: skip

        def _expected(self, start: int, seed: int) -> Any:
            first = (start // CHUNK_TOKENS * 131 + seed * 17) % _NUM_PLACES
            return self._bytes[first : first + CHUNK_BYTES]

        def batched_from_gpu(
            self, memory_objs: Any, starts: Any, ends: Any, *, seed: int = 0, **_: Any
        ) -> None:
            for one, start in zip(memory_objs, starts, strict=True):
                self._page(one).copy_(self._expected(start, seed))
            self._wait()

        def batched_to_gpu(
            self, memory_objs: Any, starts: Any, ends: Any, *, seed: int = 0, **_: Any
        ) -> None:
            for one, start in zip(memory_objs, starts, strict=True):
                page = self._page(one)
                self.num_wrong += int((page != self._expected(start, seed)).sum())
                self.num_read += page.numel()
                page.zero_()  # what a later round does not write is wrong
            self._wait()

        def _page(self, one: Any) -> Any:
            return one.raw_data.view(torch.uint8).flatten()[: one.meta.get_size()]

        def _wait(self) -> None:
            if device == "cuda":
                torch.cuda.synchronize()

    return Content()


def serve(role: str, channel: str, device: str, ports: dict[str, int]) -> None:
    """A process with an engine: answers numbers of requests until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what LMCache and NIXL print
    try:
        engine = (Sender if role == "sender" else Receiver)(channel, device, ports)
        answers.write('"ready"\n')
        answers.flush()
        for line in sys.stdin:
            answers.write(json.dumps(engine.answer(int(line))) + "\n")
            answers.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    answers.close()
    os._exit(status)  # LMCache's threads would keep it, and its own channel may not close


class Child:
    """Such a process, seen from here."""

    def __init__(self, role: str, channel: str, device: str, ports: dict[str, int]) -> None:
        words = [sys.executable, __file__, role, channel, device, json.dumps(ports)]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(role), text=True
        )

    def read(self) -> Any:
        """What it says next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the engine ended; what it said stands above"
        return json.loads(line)

    def ask(self, number: int) -> Any:
        """Its answer to a request's number."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """End its input, and it."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


def environment(role: str) -> dict[str, str]:
    """An engine takes the first GPU that it sees, and has to see its peer's."""
    visible = [str(number) for number in range(num_gpus())]
    return os.environ | {
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "ERROR",
        "PYTHONHASHSEED": "0",
        "CUDA_VISIBLE_DEVICES": ",".join(visible if role == "sender" else reversed(visible)),
    }


def num_gpus() -> int:
    """At most two of them."""
    import torch

    return min(2, int(torch.cuda.device_count()))


def devices(device: str) -> tuple[str, str]:
    """The sender's and the receiver's, as torch has them here."""
    return ("cpu", "cpu") if device == "cpu" else ("cuda:0", f"cuda:{num_gpus() - 1}")


class Pair:
    """A sender and a receiver.

    Attributes:
        num_bytes: of a request.
    """

    def __init__(self, num_bytes: int, sender: Child, receiver: Child) -> None:
        self.num_bytes, self._sender, self._receiver = num_bytes, sender, receiver
        self._number = 0
        self._times: list[dict[str, float]] = []

    def hand_over(self) -> None:
        """One request, from storing it to its notice."""
        self._number += 1
        self._times.append(self._sender.ask(self._number))

    def check(self) -> None:
        """Take the last one back: every byte is right, and its pages are free."""
        assert self._receiver.ask(self._number) == {"bytes": self.num_bytes, "wrong": 0}

    def medians(self) -> tuple[float, float]:
        """Seconds until the notice and of the writes, of all requests but the first."""
        later = self._times[1:]
        return (
            statistics.median(one["hand_over_s"] for one in later),
            statistics.median(one["written_s"] for one in later),
        )


@contextmanager
def pair_of(channel: str, device: str) -> Iterator[Pair]:
    """Engines that have met."""
    ports = dict(zip(("init", "alloc", "proxy"), free_ports(3), strict=True))
    children = [Child(role, channel, device, ports) for role in ("sender", "receiver")]
    try:
        for one in children:
            assert one.read() == "ready"
        yield Pair(NUM_CHUNKS[device] * CHUNK_BYTES, *children)
    finally:
        for one in children:
            one.close()


def free_ports(count: int) -> list[int]:
    """Ports of loopback that were free just now."""
    sockets = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def require(channel: str, device: str) -> None:
    """Skip where something is missing."""
    for name in ("torch", "lmcache", *(["nixl"] if channel == "nixl" else [])):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    if device == "cuda" and not num_gpus():
        pytest.skip("needs a GPU")


@pytest.mark.benchmark(group="LMCache's prefill and decode, chunks of 32 MiB")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("channel", ["nixl", "kvxfer"])
def test_lmcache(benchmark: Any, one_copy_gb_per_s: Any, channel: str, device: str) -> None:
    require(channel, device)
    with pair_of(channel, device) as pair:
        pair.hand_over()  # they meet
        benchmark.pedantic(pair.hand_over, setup=pair.check, rounds=ROUNDS)
        pair.check()
        hand_over_s, written_s = pair.medians()
    benchmark.extra_info["hand_over_ms"] = hand_over_s * 1e3
    if benchmark.stats:
        rate = pair.num_bytes / written_s / 1e9
        benchmark.extra_info["gb_per_s"] = rate
        limit = one_copy_gb_per_s(*devices(device), pair.num_bytes)
        benchmark.extra_info["of_limit"] = rate / limit
    if device == "cuda":
        benchmark.extra_info["gpus"] = num_gpus()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
