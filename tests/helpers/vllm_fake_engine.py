"""An engine without vLLM: the connector's two sides, a cache, and steps that "compute" KV."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from free_ports import free_ports
from numpy.typing import NDArray
from vllm_fakes import FakeTensor, finished, layer_names, step, tensor

from kvxfer.connectors.vllm.cache_map import ModelPart, map_caches
from kvxfer.connectors.vllm.config import read_config
from kvxfer.connectors.vllm.scheduler_side import SchedulerSide
from kvxfer.connectors.vllm.worker_side import WorkerSide
from kvxfer.layout import TPLayout

LAYERS, HEADS, DIM = 2, 4, 8
GUARD_S = 20.0


def kv_of(seed: int, layer: int, tokens: range) -> NDArray[np.float32]:
    """KV of a request, ``[token, K|V, head, element]``; no two elements are alike."""
    shape = (2, HEADS, DIM)
    index = np.arange(len(tokens) * int(np.prod(shape)), dtype=np.int64).reshape(-1, *shape)
    index += tokens.start * int(np.prod(shape))
    return (index * LAYERS + layer + seed * 1_000_003).astype(np.float32)


class FakeEngine:
    """One rank. Its cache is (block, K|V, token, head, element), or HND where it receives."""

    def __init__(
        self,
        role: str,
        *,
        block_size: int = 16,
        num_blocks: int = 24,
        tp: tuple[int, int] = (1, 0),
        **settings: Any,
    ) -> None:
        self.block_size = block_size
        self._is_receiver = role == "receive"
        self.heads = TPLayout(*tp).heads_of(HEADS)
        count = len(self.heads)
        shape = (
            (num_blocks, count, block_size, 2 * DIM)
            if self._is_receiver
            else (num_blocks, 2, block_size, count, DIM)
        )
        self.caches: dict[str, FakeTensor] = {name: tensor(*shape) for name in layer_names(LAYERS)}
        self.ports = free_ports(2 * tp[0])
        if self._is_receiver:
            init, alloc = self.ports[: tp[0]], self.ports[tp[0] :]
            settings |= {"init_ports": init, "alloc_ports": alloc}
        config = read_config({"transport": "loopback", **settings}, is_consumer=self._is_receiver)
        roles = {"is_producer": not self._is_receiver, "is_consumer": self._is_receiver}
        part = ModelPart(LAYERS, HEADS, block_size, rank=TPLayout(*tp))
        self.worker = WorkerSide(config, map_caches(self.caches, part), **roles)
        self.scheduler = SchedulerSide([block_size], **roles)
        self.sent: list[str] = []
        self.received: list[Any] = []

    @property
    def addresses(self) -> dict[str, str]:
        init, alloc = self.ports
        return {"init": f"tcp://127.0.0.1:{init}", "alloc": f"tcp://127.0.0.1:{alloc}"}

    def step(
        self,
        output: Any = None,
        computes: Sequence[tuple[int, Sequence[int], range]] = (),
        *,
        ended: Sequence[str] = (),
        layerwise: bool = True,
    ) -> None:
        """One engine step, that computes (seed, block ids, tokens) of some requests."""
        self.worker.begin_step(self.scheduler.build_plan(output or step()))
        for layer, name in enumerate(self.caches):
            for seed, blocks, tokens in computes:
                self.write(layer, blocks, tokens, kv_of(seed, layer, tokens))
            if layerwise:
                self.worker.layer_ready(name, None)
        self.worker.end_step(None)
        sent = self.worker.take_sent(ended)
        received = self.worker.take_received()
        self.sent += sorted(sent)
        self.received += received
        self.scheduler.reported(
            finished(recving=[one.request_id for one in received], sending=sorted(sent))
        )

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Idle steps until something holds."""
        end_s = time.monotonic() + GUARD_S
        while not condition():
            assert time.monotonic() < end_s, what
            self.step()
            time.sleep(0.002)

    def write(
        self, layer: int, blocks: Sequence[int], tokens: range, kv: NDArray[np.float32]
    ) -> None:
        """Store KV of the heads of this rank, as attention does."""
        cache = list(self.caches.values())[layer].array
        for number, token in enumerate(tokens):
            block, slot = blocks[token // self.block_size], token % self.block_size
            cache[block, :, slot] = kv[number][:, self.heads.start : self.heads.stop]

    def read(self, layer: int, blocks: Sequence[int], tokens: range) -> NDArray[np.float32]:
        """KV of tokens, of a cache that receives: ``[token, K|V, head, element]``."""
        cache = list(self.caches.values())[layer].array
        found = [cache[blocks[at // self.block_size], :, at % self.block_size] for at in tokens]
        pairs = np.stack(found).reshape(len(tokens), len(self.heads), 2, DIM)
        return pairs.transpose(0, 2, 1, 3)

    def holds(self, seed: int, blocks: Sequence[int], tokens: range) -> bool:
        """Whether these blocks have a request's KV."""
        rank = slice(self.heads.start, self.heads.stop)
        return all(
            np.array_equal(self.read(layer, blocks, tokens), kv_of(seed, layer, tokens)[:, :, rank])
            for layer in range(LAYERS)
        )

    def close(self) -> None:
        self.worker.close()
