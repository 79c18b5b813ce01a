"""A store that its sender's pool does not hold goes out in parts that the pool holds.

LMCache gathers all chunks of a store before it sends any; one of more chunks than pages waits for
ever, or part of it is notified as all. Its back ends take parts as they take the steps of a chunked
prefill: as batches of one request, of which the last says so.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens ``start`` .. ``end`` of a store, both whole chunks apart from the end of the last."""

    start: int
    end: int
    is_last: bool


def parts_of(first: int, count: int, *, chunk_tokens: int, num_pages: int) -> Iterator[Part]:
    """The parts of a store of tokens ``first`` .. ``count``.

    All of it where the pool has a page for each chunk; else parts of half the pool, so that one is
    gathered while another is on its way.
    """
    step = chunk_tokens * max(1, num_pages // 2)
    if math.ceil((count - first) / chunk_tokens) <= num_pages:
        step = max(1, count - first)
    for start in range(first, count, step):
        yield Part(start, min(count, start + step), start + step >= count)


def splitting(stock: Callable[..., None], pool_of: Callable[[Any], int | None]) -> Any:
    """LMCache's ``LMCacheEngine.store``, in parts where need be.

    Args:
        stock: LMCache's own.
        pool_of: pages of an engine's pool; None where its stores stay as they are.
    """

    @functools.wraps(stock)
    def store(
        self: Any,
        tokens: Any = None,
        hashes: Any = None,
        offsets: Any = None,
        mask: Any = None,
        **kwargs: Any,
    ) -> None:
        spec: Any = kwargs.get("transfer_spec")
        num_pages = None if spec is None or tokens is None else pool_of(self)
        if num_pages is None:
            return stock(self, tokens, hashes, offsets, mask, **kwargs)
        first = 0 if mask is None else len(mask) - int(mask.sum())
        chunk_tokens = self.config.chunk_size
        was_last = spec.is_last_prefill
        try:
            for part in parts_of(
                first, len(tokens), chunk_tokens=chunk_tokens, num_pages=num_pages
            ):
                spec.is_last_prefill = was_last and part.is_last
                stock(self, tokens[: part.end], mask=_mask_of(part), **kwargs)
        finally:
            spec.is_last_prefill = was_last

    return store


def _mask_of(part: Part) -> Any:
    """LMCache's: which tokens are to be stored."""
    import torch

    return torch.arange(part.end) >= part.start
