"""Two sums over each block of a cache, by which copies of a block are compared where they lie.

A block is read as words of four bytes (fewer where its pages are no multiple), each
multiplied by an odd weight of its place, and added up modulo 2**64; twice, with other weights. A
word that is wrong alone is always seen, since odd factors are invertible. Of several that are
wrong, missing or elsewhere, with differences that do not depend on the weights, one in 2**32 at
most goes unseen by a sum, and one in 2**64 by both. The weights are no secret, so that this is no
protection against somebody who wants to deceive.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout

NUM_SUMS: Final = 2
_CHUNK_BYTES: Final = 16 << 20  # of pages at a time: what is computed of them takes four times that
_STEP: Final = 0x9E3779B97F4A7C15  # odd, so that counting by it meets every word once
_FACTORS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def word_bytes(page_bytes: int) -> int:
    """Bytes of the words that a page is read as: 4, or what divides it."""
    return next(size for size in (4, 2, 1) if page_bytes % size == 0)


def weights(num_words: int) -> NDArray[np.int64]:
    """Odd weights, ``[sum, word of a block]``; the same in every process."""
    count = np.arange(1, NUM_SUMS * num_words + 1, dtype=np.uint64)
    mixed = count * np.uint64(_STEP)  # arrays wrap
    for shift, factor in _FACTORS:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    odd: NDArray[np.int64] = ((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64)
    return odd.reshape(NUM_SUMS, num_words)


class PageSums:
    """Sums over blocks of torch tensors, on their device. Not thread-safe."""

    def __init__(self, layout: KVLayout) -> None:
        """For arrays of one layer of ``layout`` each, without gaps, axes in the order they lie."""
        self._num_planes = layout.planes_per_layer
        self._word_bytes = word_bytes(layout.page_bytes)
        self._page_words = layout.page_bytes // self._word_bytes
        self._block_bytes = self._num_planes * layout.page_bytes
        self._weights: Any = None

    def of(self, array: Any, block_ids: NDArray[np.int64]) -> Any:
        """The sums of blocks of a layer, ``[block, sum]``, queued on the current stream.

        Raises:
            InvalidUsage: a block that the array does not have; a GPU would fail for good.
        """
        import torch

        words = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[self._word_bytes]
        flat = array.reshape(-1).view(torch.uint8).view(words)
        # K of all blocks and then V of all blocks, where they are planes of their own.
        pages = flat.view(self._num_planes, -1, self._page_words)
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < pages.shape[1]:
            raise InvalidUsage(f"blocks {block_ids} of a cache that has {pages.shape[1]}")
        if self._weights is None:
            flat_weights = torch.from_numpy(weights(self._num_planes * self._page_words))
            shape = (NUM_SUMS, self._num_planes, 1, self._page_words)
            self._weights = flat_weights.view(shape).to(array.device)
        ids = torch.from_numpy(block_ids).to(array.device)
        sums = torch.empty((len(block_ids), NUM_SUMS), dtype=torch.int64, device=array.device)
        step = max(_CHUNK_BYTES // self._block_bytes, 1)
        for begin in range(0, len(block_ids), step):
            some = pages.index_select(1, ids[begin : begin + step]).to(torch.int64)
            for number in range(NUM_SUMS):
                products = some * self._weights[number]
                sums[begin : begin + step, number] = products.sum((0, 2))
        return sums

    def taken(self, sums: Sequence[Any]) -> list[bytes]:
        """What :meth:`of` gave, as bytes: `NUM_SUMS` numbers of eight bytes a block; waits for it,
        and copies once."""
        import torch

        host: NDArray[np.int64] = torch.cat(list(sums)).cpu().numpy().astype("<i8")
        ends = np.cumsum([len(one) for one in sums])[:-1]
        return [part.tobytes() for part in np.split(host, ends)]
