"""`KvxferLMCacheConnector` for vLLM on a CPU, for which LMCache has all but a copy.

``CreateGPUConnector`` of LMCache makes none for a vLLM without an accelerator. Here is one; all
else, from the scheduler to the pages on the wire, is LMCache's, vLLM's and kvxfer's own. CPU
kernels keep K of a block transposed, so that chunks of whole blocks are copied and no others.
"""

from collections.abc import Iterator
from typing import Any

import torch
from lmcache.v1 import gpu_connector
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector

from kvxfer.connectors.lmcache.connector import KvxferLMCacheConnector as _Connector

__all__ = ["KvxferLMCacheConnector"]
_TOKEN_AXIS = 2  # of a layer's cache: block, head, token, K and V side by side


class Copies(MockGPUConnector):  # type: ignore[misc]
    """Between vLLM's blocks and LMCache's pages, which both engines fill in one order."""

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            for page, cache, blocks in _layers(one, start, end, kwargs):
                page.copy_(cache[blocks])

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            for page, cache, blocks in _layers(one, start, end, kwargs):
                cache[blocks] = page

    def get_shape(self, num_tokens: int | None = None) -> torch.Size:
        layers, planes, chunk, heads, size = self.kv_shape
        return torch.Size([planes, layers, num_tokens or chunk, heads * size])


def _layers(one: Any, start: int, end: int, kwargs: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """For each layer its part of a page by block, its cache, and the numbers of the blocks."""
    caches = kwargs["kvcaches"]
    size = caches[0].shape[_TOKEN_AXIS]
    assert (end - start) % size == 0, f"{end - start} tokens are not whole blocks of {size}"
    blocks = kwargs["slot_mapping"][start:end:size] // size
    for part, cache in zip(one.tensor.view(len(caches), -1), caches, strict=True):
        yield part.view(len(blocks), *cache.shape[1:]), cache, blocks


gpu_connector.CreateGPUConnector = lambda config, metadata, *_, **__: Copies(metadata.kv_shape)


class KvxferLMCacheConnector(_Connector):  # type: ignore[misc]
    """Loaded by vLLM from here, so that the line above has run."""
