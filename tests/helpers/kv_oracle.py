"""What ranks hold of a paged KV cache, worked out by brute force and apart from the planner.

A model's cache is an array ``[layers, K|V, tokens, heads, head_dim]`` whose every element has a
code of its own. A rank's memory is made from it with numpy's own axis arithmetic, for any kind,
order, block table and gaps. From kvxfer it takes nothing, not even sizes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]

# Axes from the slowest: layer, kv, block, token, head (and dim).
_MEMORY_AXES = {
    ("split", "nhd"): "lkbthd",
    ("split", "hnd"): "lkbhtd",
    ("packed", "nhd"): "lbkthd",
    ("packed", "hnd"): "lbkhtd",
    ("head_packed", "nhd"): "lbthkd",
    ("head_packed", "hnd"): "lbhtkd",
    ("chunked", "nhd"): "bklthd",
    ("chunked", "hnd"): "bklhtd",
    ("mla", "nhd"): "lbthkd",
    ("mla", "hnd"): "lbhtkd",
}
_AXES = "lkbthd"
NO_GAPS = (0,) * len(_AXES)

KINDS = ("split", "packed", "head_packed", "chunked")
ORDERS = ("nhd", "hnd")
ITEMSIZE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1}

# What stands where no token of the request lies; no code is as large.
SRC_FILLER = 0xFFFF
DST_FILLER = 0xEEEE


def heads_of(rank: int, tp_size: int, num_heads: int) -> range:
    """The heads of a rank: floor(rank * H / P) .. ceil((rank + 1) * H / P) - 1."""
    return range(
        int(np.floor(rank * num_heads / tp_size)),
        int(np.ceil((rank + 1) * num_heads / tp_size)),
    )


def stage_layers(num_layers: int, stages: int | tuple[int, ...]) -> list[range]:
    """Layers of each pipeline stage: so many even stages, or stages that end at these layers."""
    if isinstance(stages, int):
        parts = np.array_split(np.arange(num_layers), stages)
        return [range(int(part[0]), int(part[-1]) + 1) for part in parts]
    return [range(*bounds) for bounds in zip((0, *stages), stages, strict=False)]


def codes(num_layers: int, num_vectors: int, num_tokens: int, heads: int, dim: int) -> Indices:
    """Codes ``[layers, K|V, tokens, heads, dim]``, distinct and above zero."""
    shape = (num_layers, num_vectors, num_tokens, heads, dim)
    made = np.arange(1, 1 + int(np.prod(shape)), dtype=np.int64).reshape(shape)
    assert made.max(initial=0) < DST_FILLER, f"{shape} is too large for codes of two bytes"
    return made


@dataclass(frozen=True)
class Blocks:
    """A request's blocks in the order of its tokens; the first slot holds ``first_token``."""

    ids: tuple[int, ...]
    first_token: int
    block_size: int

    @property
    def tokens(self) -> range:
        return range(self.first_token, self.first_token + len(self.ids) * self.block_size)

    def place(self, token: int) -> tuple[int, int]:
        """(block, slot) of a token."""
        index, slot = divmod(token - self.first_token, self.block_size)
        return self.ids[index], slot


@dataclass(frozen=True)
class RankCache:
    """The memory of one rank.

    ``gaps`` are unused entries behind each of the axes l, k, b, t, h, d. A ``plane_seed`` above 0
    shuffles which layer and which of K and V lies where.
    """

    kind: str
    order: str
    layers: range
    heads: range
    block_size: int
    head_dim: int
    num_blocks: int
    itemsize_bytes: int
    gaps: tuple[int, ...] = NO_GAPS
    plane_seed: int = 0

    @property
    def num_vectors(self) -> int:
        return 1 if self.kind == "mla" else 2

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return (
            len(self.layers),
            self.num_vectors,
            self.num_blocks,
            self.block_size,
            len(self.heads),
            self.head_dim,
        )

    @cached_property
    def num_bytes(self) -> int:
        padded = [size + gap for size, gap in zip(self._sizes, self.gaps, strict=True)]
        return int(np.prod(padded)) * self.itemsize_bytes

    @cached_property
    def elements(self) -> Indices:
        """Which element of the memory is ``[layer, K|V, block, slot, head, dim]``, from 0."""
        axes = _MEMORY_AXES[self.kind, self.order]
        padded = [self._sizes[_AXES.index(a)] + self.gaps[_AXES.index(a)] for a in axes]
        memory = np.arange(int(np.prod(padded)), dtype=np.int64).reshape(padded)
        logical = memory.transpose([axes.index(a) for a in _AXES])
        logical = logical[tuple(slice(size) for size in self._sizes)]
        if not self.plane_seed:
            return logical
        planes = logical.reshape(-1, *logical.shape[2:])
        order = np.random.default_rng(self.plane_seed).permutation(len(planes))
        return planes[order].reshape(logical.shape)

    def addresses(self, address: int) -> NDArray[np.uint64]:
        """Addresses ``[layers, K|V]`` of the first vectors in memory that begins at ``address``."""
        first = self.elements[:, :, 0, 0, 0, 0] * self.itemsize_bytes
        return first.astype(np.uint64) + np.uint64(address)

    def stride_bytes(self, axis: str) -> int:
        """From one entry of axis b, t or h to the next, of an axis of one entry as if of two."""
        axes = _MEMORY_AXES[self.kind, self.order]
        inner = axes[axes.index(axis) + 1 :]
        counts = [self._sizes[_AXES.index(a)] + self.gaps[_AXES.index(a)] for a in inner]
        return int(np.prod(counts)) * self.itemsize_bytes

    def fresh(self, filler: int) -> Bytes:
        """Memory that holds no token."""
        return self._of_type(np.full(self.num_bytes // self.itemsize_bytes, filler))

    def write(
        self, memory: Bytes, content: NDArray[Any], blocks: Blocks, tokens_of: dict[int, range]
    ) -> None:
        """Write elements ``[layers, K|V, tokens, heads, dim]`` of the model where they belong.

        Of each layer, as the model numbers it, the tokens that ``tokens_of`` has; all heads here.
        """
        flat = memory.view(f"u{self.itemsize_bytes}")
        heads = slice(self.heads.start, self.heads.stop)
        for layer, tokens in tokens_of.items():
            if layer not in self.layers:
                continue
            for token in tokens:
                places = self.elements[
                    (layer - self.layers.start, slice(None), *blocks.place(token))
                ]
                flat[places] = content[layer, :, token, heads]

    def written(self, blocks: Blocks, tokens_of: dict[int, range]) -> NDArray[np.bool_]:
        """Which bytes of the memory ``write`` would write, ``[num_bytes]``."""
        marks = self._of_type(np.zeros(self.num_bytes // self.itemsize_bytes))
        last = max((tokens.stop for tokens in tokens_of.values()), default=0)
        shape = (self.layers.stop, self.num_vectors, last, self.heads.stop, self.head_dim)
        ones = (1 << 8 * self.itemsize_bytes) - 1
        self.write(marks, np.broadcast_to(np.uint32(ones), shape), blocks, tokens_of)
        return marks == 0xFF

    def explain(self, byte: int) -> str:
        """What a byte of the memory is, in words."""
        found = np.argwhere(self.elements == byte // self.itemsize_bytes)
        if not len(found):
            return "a gap"
        layer, vector, block, slot, head, dim = (int(index) for index in found[0])
        return (
            f"layer {layer + self.layers.start}, {'KV'[vector]}, block {block}, slot {slot}, "
            f"head {head + self.heads.start}, element {dim}"
        )

    def _of_type(self, values: NDArray[Any]) -> Bytes:
        mask = (1 << 8 * self.itemsize_bytes) - 1
        typed = (values.astype(np.int64) & mask).astype(f"u{self.itemsize_bytes}")
        return typed.view(np.uint8)


def moved_tokens(tokens: range, windows: tuple[int, ...], layers: list[int]) -> dict[int, range]:
    """For each of ``layers`` the tokens that a transfer of ``tokens`` moves.

    A layer of window w needs the last w tokens alone; 0 is no window.
    """
    moved = {}
    for layer in layers:
        window = windows[layer] if windows else 0
        needed = [t for t in tokens if not window or t >= tokens.stop - window]
        moved[layer] = range(needed[0], needed[-1] + 1) if needed else range(0)
    return moved


def compare(cache: RankCache, actual: Bytes, expected: Bytes) -> None:
    """Fail at the first byte that differs, and say what it is."""
    if np.array_equal(actual, expected):
        return
    byte = int(np.flatnonzero(actual != expected)[0])
    raise AssertionError(
        f"{cache.explain(byte)} (byte {byte}): is {actual[byte]:#x}, should be {expected[byte]:#x}"
    )
