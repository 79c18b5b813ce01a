"""A process with one LMCache engine, driven by name as `peer_host.py` is.

Run as ``python lmcache_host.py`` by an interpreter that has LMCache.
"""

import dataclasses
import json
import os
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import peer_host
import torch
from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1 import token_database
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

from kvxfer.errors import TransferFailed

CHUNK = 256
KV_SHAPE = (4, 2, CHUNK, 8, 64)
PERIOD = 251


class Content(MockGPUConnector):  # type: ignore[misc]
    """In place of a GPU: fills pages with bytes of a seed, and checks those that come back."""

    def __init__(self) -> None:
        super().__init__(KV_SHAPE)
        self.num_wrong = 0
        self.num_read = 0

    def batched_from_gpu(
        self, memory_objs: Any, starts: Any, ends: Any, *, seed: int = 0, **_: Any
    ) -> None:
        for one, start in zip(memory_objs, starts, strict=True):
            _bytes_of(one).copy_(_expected(one, seed + start))

    def batched_to_gpu(
        self, memory_objs: Any, starts: Any, ends: Any, *, seed: int = 0, **_: Any
    ) -> None:
        for one, start in zip(memory_objs, starts, strict=True):
            self.num_wrong += int((_bytes_of(one) != _expected(one, seed + start)).sum())
            self.num_read += one.meta.get_size()


def _bytes_of(one: Any) -> torch.Tensor:
    return one.raw_data.view(torch.uint8).flatten()[: one.meta.get_size()]


def _expected(one: Any, seed: int) -> torch.Tensor:
    return content(one.meta.get_size(), seed)


def content(num_bytes: int, seed: int) -> torch.Tensor:
    """Bytes of a seed."""
    period = ((torch.arange(PERIOD) * 7 + seed) % PERIOD).to(torch.uint8)
    return period.repeat(num_bytes // PERIOD + 1)[:num_bytes]


class LMCacheHost:
    """One engine at a time, and what a test wants to know of it."""

    def __init__(self) -> None:
        self.engine: Any = None
        self._number = 0

    def install(self, *, upgrade: bool = False) -> None:
        from kvxfer.connectors.lmcache import install

        install(upgrade=upgrade)

    def open(
        self, *, config: dict[str, Any], world_size: int = 1, worker_id: int = 0, model: str = "m"
    ) -> str:
        """Build an engine; returns the class of its channel."""
        self._number += 1
        self._id = f"engine-{self._number}"
        metadata = LMCacheMetadata(
            model, world_size, world_size, worker_id, worker_id, torch.bfloat16, KV_SHAPE,
            role="worker",
        )  # fmt: skip
        self.content = Content()
        self.engine = LMCacheEngineBuilder.get_or_create(
            self._id,
            LMCacheEngineConfig.from_defaults(**config, lmcache_instance_id=self._id),
            metadata,
            self.content,
            mock_up_broadcast_fn,
            mock_up_broadcast_object_fn,
        )
        self.engine.post_init()
        return type(self.backend.transfer_channel).__name__ if config.get("enable_pd") else ""

    def plugin_settings(self, *, extra: dict[str, Any]) -> dict[str, Any]:
        """What the storage plug-in tells its store, of which none is made."""
        from kvxfer.connectors.lmcache import storage

        given: dict[str, Any] = {}
        with mock.patch.object(storage, "ChunkStore", lambda *_, **more: given.update(more)):
            storage.KvxferBackend(
                config=SimpleNamespace(extra_config=extra),
                metadata=SimpleNamespace(worker_id=0, kv_shape=(1,), kv_dtype=torch.bfloat16),
                local_cpu_backend=object(),
            )
        return given

    @property
    def backend(self) -> Any:
        return self.engine.storage_manager.storage_backends["PDBackend"]

    def store(
        self, *, first: int, count: int, spec: dict[str, Any] | None, seed: int = 0,
        skip: int = 0, timeout_s: float = 20.0,
    ) -> str:  # fmt: skip
        """Store tokens ``first`` .. ``first + count`` but for ``skip`` at their beginning.

        Returns ``ok``, ``blocked`` or the error.
        """
        outcome = ["blocked"]
        target = None if spec is None else SimpleNamespace(receiver_query_port=None, **spec)

        def run() -> None:
            try:
                self.engine.store(
                    list(range(first, first + count)),
                    mask=torch.arange(count) >= skip,
                    transfer_spec=target,
                    req_id="" if spec is None else spec["req_id"],
                    seed=seed,
                )
                outcome[0] = "ok"
            except Exception as error:
                outcome[0] = f"{type(error).__name__}: {error}"

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(timeout_s)
        return outcome[0]

    def lookup(self, *, first: int, count: int) -> int:
        return int(self.engine.lookup(list(range(first, first + count))))

    def retrieve(self, *, first: int, count: int, seed: int = 0) -> dict[str, int]:
        """How many tokens came, and how many of their bytes are wrong."""
        self.content.num_wrong = self.content.num_read = 0
        mask = self.engine.retrieve(list(range(first, first + count)), seed=seed)
        return {
            "tokens": int(mask.sum()),
            "wrong": self.content.num_wrong,
            "bytes": self.content.num_read,
        }

    def free_pages(self, *, wanted: int | None = None, timeout_s: float = 25.0) -> int:
        """Free pages; with ``wanted``, once they are so many, or the time is over."""
        deadline = time.monotonic() + timeout_s
        blocks = self.backend.memory_allocator.cpu_allocator.free_blocks
        while wanted is not None and len(blocks) != wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        return len(blocks)

    def num_keys(self) -> int:
        return len(self.backend.data)

    def keys(self, *, first: int, count: int) -> list[str]:
        """The keys of tokens, as senders name them."""
        found = self.engine.token_database.process_tokens(list(range(first, first + count)))
        return [key.to_string() for *_, key in found]

    def settle(self) -> None:
        """Wait for the plug-in's puts."""
        plugin = self.engine.storage_manager.storage_backends["kvxfer"]
        plugin._worker.submit(lambda: None).result(25.0)

    def references(self) -> list[int]:
        """Reference counts of the objects that LocalCPU has: 1 each, where nobody else has one."""
        cache = self.engine.storage_manager.storage_backends["LocalCPUBackend"].hot_cache
        return sorted({one.get_ref_count() for one in cache.values()})

    def moved_bytes(self) -> int:
        """Bytes that the channel has moved to all peers."""
        return sum(one.num_bytes for one in self.backend.transfer_channel.counts().values())

    def fail_next_write(self) -> None:
        """The next copy ends in its middle, with an error."""
        self._spoil(lambda: (_ for _ in ()).throw(TransferFailed("planted")))

    def hold_next_write(self) -> None:
        """The next copy does not end before it is let go."""
        self._held = threading.Event()
        self._spoil(self._held.wait)

    def let_go(self) -> None:
        self._held.set()

    def see_nothing_arrive(self) -> None:
        """As if every transfer to this side were still under way."""
        self.backend._parts.arrivals._writers.has_completed = lambda *_: False

    def lookup_as_it_arrives(self, *, first: int, count: int) -> int:
        """See what has arrived, and look it up at once."""
        del self.backend._parts.arrivals._writers.has_completed
        return self.lookup(first=first, count=count)

    def hash_otherwise(self) -> None:
        """Begin the chain of hashes elsewhere."""
        token_database.NONE_HASH = 12345

    def _spoil(self, then: Any) -> None:
        lanes = self.backend.transfer_channel._peers._lanes
        (lane,) = lanes.values()
        link = lane.connect().link
        post = link.post

        def spoilt(plan: Any, *args: Any, **kwargs: Any) -> Any:
            del link.post
            first = dataclasses.replace(plan, boxes=plan.boxes[:1])
            post(first, *args, **kwargs)
            then()
            return post(plan, *args, **kwargs)

        link.post = spoilt

    def shut(self, *, timeout_s: float = 25.0) -> float:
        """Close the engine; returns the seconds that took, -1 if it hung."""
        began = time.monotonic()
        thread = threading.Thread(
            target=LMCacheEngineBuilder.destroy, args=(self._id,), daemon=True
        )
        thread.start()
        thread.join(timeout_s)
        return -1.0 if thread.is_alive() else time.monotonic() - began

    def held(self) -> list[str]:
        """Threads and sockets of this package that are left."""
        threads = [one.name for one in threading.enumerate() if "kvxfer" in one.name]
        return sorted(threads)

    def close(self) -> None:
        """The process ends."""


def run(host: Any) -> None:
    """Answer calls of the methods of ``host`` until the input ends."""
    # What LMCache and NIXL print goes to standard error; the other side reads answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    peer_host._write = write
    write({"ready": True})
    peer_host.serve(host)


if __name__ == "__main__":
    run(LMCacheHost())
