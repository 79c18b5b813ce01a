"""Digests of KV without torch: sums by numpy, caches of random bytes, and steps of two workers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm_fakes import FakeTensor, layer_names

from kvxfer.connectors.vllm import digests
from kvxfer.connectors.vllm.cache_map import CacheMap, ModelPart, map_caches
from kvxfer.connectors.vllm.page_sums import weights, word_bytes
from kvxfer.connectors.vllm.params import ReceiverAddress
from kvxfer.connectors.vllm.receive_side import Ended
from kvxfer.connectors.vllm.step import Part, Placement, SendStart, StepPlan, Table
from kvxfer.layout import KVLayout, KVShard

BLOCK = 4
HEADS, DIM = 2, 4


class NumpySums:
    """What `PageSums` gives, computed one block after the other."""

    def __init__(self, layout: KVLayout) -> None:
        self._planes, self._page_bytes = layout.planes_per_layer, layout.page_bytes
        self._word = {4: np.int32, 2: np.int16, 1: np.uint8}[word_bytes(layout.page_bytes)]

    def of(self, array: FakeTensor, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        raw = array.array.reshape(-1).view(np.uint8).reshape(self._planes, -1, self._page_bytes)
        sums = []
        for block in block_ids:
            words = np.ascontiguousarray(raw[:, block]).reshape(-1).view(self._word)
            sums.append([int(np.sum(words * one)) for one in weights(len(words))])
        return np.array(sums, np.int64).reshape(-1, 2)

    def taken(self, sums: Sequence[NDArray[np.int64]]) -> list[bytes]:
        return [one.astype("<i8").tobytes() for one in sums]


def random_caches(
    *shape: int, seed: int, num_layers: int = 2, dtype: Any = np.float32
) -> dict[str, FakeTensor]:
    rng = np.random.default_rng(seed)
    size = np.dtype(dtype).itemsize

    def one() -> FakeTensor:
        raw = rng.integers(0, 256, int(np.prod(shape)) * size, np.uint8)
        return FakeTensor(raw.view(dtype).reshape(shape))

    return {name: one() for name in layer_names(num_layers)}


class Worker:
    """Digests of a worker, and steps that its scheduler would tell it of."""

    def __init__(
        self,
        path: Path,
        caches: dict[str, FakeTensor],
        *,
        block: int = BLOCK,
        heads: int = HEADS,
        **part: Any,
    ) -> None:
        self.map: CacheMap = map_caches(caches, ModelPart(len(caches), heads, block, **part))
        self.digests = digests.Digests(path, self.map, KVShard(self.map.layout, self.map.rank))
        self._block = block

    def sends(self, blocks: Sequence[int], num_tokens: int, *, chunk: int = 1000) -> None:
        """A request t that is prefilled in chunks, and sent."""
        self.begins(num_tokens=num_tokens)
        for begin in range(0, num_tokens, chunk):
            self.computes(blocks, begin, min(begin + chunk, num_tokens), num_tokens)
        self.digests.sent(["p"])

    def begins(self, attempt: int = 1, num_tokens: int = 8) -> None:
        to = (ReceiverAddress("tcp://h:1", "tcp://h:2"),)
        start = SendStart("p", "t", attempt, to, num_tokens)
        self.digests.begin_step(StepPlan(starts=[start]))

    def computes(self, blocks: Sequence[int], begin: int, end: int, num_tokens: int) -> None:
        tables = tuple(Table.covering(blocks, self._block, (begin, end)) for _ in self._groups)
        part = Part("p", (begin, end), tables, is_last=end == num_tokens)
        self.digests.begin_step(StepPlan(parts=[part]))

    def receives(self, blocks: Sequence[int], num_tokens: int, *, held: int = 0) -> None:
        """The same on the other side, where the first ``held`` tokens are cached."""
        self.places(blocks, num_tokens, held=held)
        self.digests.received([Ended("d")])

    def places(self, blocks: Sequence[int], num_tokens: int, *, held: int = 0) -> None:
        table = Table.covering(blocks, self._block, (held, num_tokens)).without_left(self._block)
        placement = Placement("d", "t", num_tokens, tuple(table for _ in self._groups), True)
        self.digests.begin_step(StepPlan(placements=[placement]))

    @property
    def _groups(self) -> range:
        return range(self.map.layout.num_groups)


def copied(
    source: dict[str, FakeTensor],
    target: dict[str, FakeTensor],
    blocks: Sequence[tuple[int, int]],
    axis: int = 0,
) -> None:
    """Move blocks, (from, to) each, of all layers; ``axis`` counts the blocks."""
    for name, one in source.items():
        for src, dst in blocks:
            place = (slice(None),) * axis
            target[name].array[(*place, dst)] = one.array[(*place, src)]
