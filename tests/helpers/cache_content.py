"""The memory under a test's KV cache: where its pages lie, what they hold, and what they should.

Every array has guard bytes on both sides. Contents are seeded random bytes, so that no page, and no
part of one, can stand for another. The arithmetic is this file's own, not that of kvxfer.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

GUARD_BYTES = 4096
_ALIGNMENT_BYTES = 64
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class CacheShape:
    """A cache of ``num_arrays`` equal arrays; the fields of ``layout`` are those of KVLayout."""

    layout: tuple[tuple[str, Any], ...]
    num_blocks: int = 16
    num_arrays: int = 1

    @property
    def fields(self) -> dict[str, Any]:
        return dict(self.layout)

    @property
    def num_planes(self) -> int:
        fields = self.fields
        return int(fields["num_layers"]) * (2 if fields.get("kv", "split") == "split" else 1)

    @property
    def page_bytes(self) -> int:
        fields = self.fields
        per_token = fields["num_kv_heads"] * fields["head_dim"] * _ITEMSIZE[fields["dtype"]]
        packed = 2 if fields.get("kv") == "packed" else 1
        return int(fields["block_size"] * per_token * packed)

    @property
    def array_bytes(self) -> int:
        return self.num_planes // self.num_arrays * self.num_blocks * self.page_bytes

    @property
    def raw_bytes(self) -> int:
        return GUARD_BYTES + self.array_bytes + GUARD_BYTES

    def content(self, seed: int) -> Bytes:
        """Bytes ``[num_arrays, raw_bytes]``, guards included, of a cache filled with ``seed``."""
        random = np.random.default_rng(seed)
        return random.integers(0, 256, (self.num_arrays, self.raw_bytes), dtype=np.uint8)

    def pages(self, content: Bytes) -> Bytes:
        """A view ``[num_planes', planes_per_array, num_blocks, page_bytes]`` of such bytes."""
        inner = content[:, GUARD_BYTES : GUARD_BYTES + self.array_bytes]
        return inner.reshape(self.num_arrays, -1, self.num_blocks, self.page_bytes)

    def copied(
        self, src: Bytes, dst: Bytes, src_block_ids: list[int], dst_block_ids: list[int]
    ) -> Bytes:
        """What ``dst`` must hold after the blocks were copied: the oracle of a transfer."""
        result = dst.copy()
        for src_id, dst_id in zip(src_block_ids, dst_block_ids, strict=True):
            self.pages(result)[:, :, dst_id] = self.pages(src)[:, :, src_id]
        return result


def shape(*, num_blocks: int = 16, num_arrays: int = 1, **fields: Any) -> CacheShape:
    """A small cache (4 planes, pages of 128 bytes) with ``fields`` of its layout replaced."""
    layout = {
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 8,
        "dtype": "bfloat16",
        "block_size": 4,
        "order": "nhd",
        "kv": "split",
    } | fields
    return CacheShape(tuple(layout.items()), num_blocks, num_arrays)


def private_array(num_bytes: int) -> Bytes:
    """Memory of this process alone, aligned as a shared segment is."""
    memory = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + num_bytes]


def check_content(shape: CacheShape, actual: Bytes, expected: Bytes) -> None:
    """Fail where any byte differs, and say whether it is a page's or a guard's."""
    if np.array_equal(actual, expected):
        return
    array, offset = (int(axis[0]) for axis in np.nonzero(actual != expected))
    at = offset - GUARD_BYTES
    if not 0 <= at < shape.array_bytes:
        raise AssertionError(f"guard byte {offset} of array {array} was written")
    plane, rest = divmod(at, shape.num_blocks * shape.page_bytes)
    block, byte = divmod(rest, shape.page_bytes)
    raise AssertionError(
        f"array {array}, plane {plane}, block {block}, byte {byte}: is {actual[array, offset]}, "
        f"should be {expected[array, offset]}"
    )
