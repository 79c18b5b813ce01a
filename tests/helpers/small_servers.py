"""Endpoints of this process with small caches, which may say what is not so."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from fake_arrays import aligned

from kvxfer import Endpoint, KVCache, KVLayout, TPLayout
from kvxfer.control import InitReply, InitRequest


def layout(**changes: Any) -> KVLayout:
    fields = {"head_dim": 8, "dtype": "bfloat16", "block_size": 4} | changes
    return KVLayout(fields.pop("num_layers", 2), fields.pop("num_kv_heads", 2), **fields)


class Server(Endpoint):
    """An endpoint that says of its cache what a test wants."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache, transport="loopback")
        self.changes: dict[str, Any] = {}

    def _init(self, request: InitRequest) -> InitReply:
        reply = super()._init(request)
        return msgspec.structs.replace(reply, **{"layout_hash": ""} | self.changes)


ONLY_RANK = TPLayout()
HALVES = [TPLayout(2, rank) for rank in range(2)]


@contextmanager
def serving(model: KVLayout, rank: TPLayout = ONLY_RANK) -> Iterator[Server]:
    cache = KVCache(model, aligned(8 * rank.rank_layout(model).block_bytes), rank=rank)
    with cache, Server(cache) as endpoint:
        yield endpoint
