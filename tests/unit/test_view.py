"""KVView: where dense caches lie, against numpy's strides; what overlaps or wraps is refused."""

import dataclasses
from itertools import product

import numpy as np
import pytest
from kv_oracle import KINDS, ORDERS, RankCache

from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout, KVShard, KVView, Strides, TPLayout

LAYOUT = KVLayout(2, 1, head_dim=2, dtype="int8", block_size=2)
PAGE = 4
NUM_BLOCKS = 8


def view(**changes: object) -> KVView:
    fields: dict[str, object] = {
        "addresses": np.arange(4, dtype=np.uint64).reshape(2, 2) * np.uint64(NUM_BLOCKS * PAGE),
        "block_stride_bytes": PAGE,
        "token_stride_bytes": 2,
        "head_stride_bytes": 2,
    }
    return KVView(KVShard(LAYOUT), NUM_BLOCKS, **fields | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [TPLayout(), TPLayout(3, 1), TPLayout(2, 1, pp_size=2, pp_rank=1)])
@pytest.mark.parametrize(
    ("kind", "order"), [*product(KINDS, ORDERS), ("mla", "nhd"), ("mla", "hnd")]
)
def test_dense_is_the_array_that_numpy_makes(kind: str, order: str, rank: TPLayout) -> None:
    heads = 1 if kind == "mla" else 4
    model = KVLayout(3, heads, head_dim=6, block_size=4, order=order, kv=kind)
    shard = KVShard(model, rank)
    made = KVView.dense(shard, 5, 1 << 40)
    cache = RankCache(
        kind,
        order,
        shard.layers,
        shard.heads,
        block_size=4,
        head_dim=6,
        num_blocks=5,
        itemsize_bytes=2,
    )
    assert np.array_equal(made.addresses, cache.addresses(1 << 40))
    strides = Strides.dense(shard.layout, 5)
    steps = (made.block_stride_bytes, made.token_stride_bytes, made.head_stride_bytes)
    assert steps == (strides.block_bytes, strides.token_bytes, strides.head_bytes)
    assert steps == tuple(cache.stride_bytes(axis) for axis in "bth")
    assert 5 * shard.layout.block_bytes == cache.num_bytes


def test_the_layout_of_a_view_is_that_of_its_rank() -> None:
    model = KVLayout(6, 8, head_dim=16)
    shard = KVShard(model, TPLayout(4, 1, pp_size=2))
    made = KVView.dense(shard, 3, 0)
    assert made.layout == KVLayout(3, 2, head_dim=16) == shard.layout
    assert made.addresses.shape == (3, 2)


def test_span_ends_with_the_last_vector() -> None:
    assert view().span_bytes == NUM_BLOCKS * PAGE
    assert view(block_stride_bytes=10).span_bytes == 74
    assert view(block_stride_bytes=10, token_stride_bytes=5).span_bytes == 7 * 10 + 5 + 2
    # An axis of one entry takes no room, however long its stride.
    assert view(head_stride_bytes=1 << 40).span_bytes == NUM_BLOCKS * PAGE


def test_a_span_may_end_at_the_end_of_the_address_space() -> None:
    last = (1 << 64) - NUM_BLOCKS * PAGE
    addresses = np.array([[0, 1], [2, last]], np.uint64)
    assert int(view(addresses=addresses).addresses[1, 1]) == last
    addresses[1, 1] += np.uint64(1)
    with pytest.raises(InvalidUsage, match="the cache at 0xffffffffffffffe1 spans 32 bytes"):
        view(addresses=addresses)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"addresses": [[0, 0], [0, 0]]}, "addresses is list; use a numpy array of uint64"),
        ({"addresses": np.zeros((2, 2), np.int64)}, "addresses is int64"),
        ({"addresses": np.zeros((2, 2), ">u8")}, "addresses is >u8"),
        (
            {"addresses": np.zeros((2, 1), np.uint64)},
            r"shape \(2, 1\); the layout has 2 layers of 2 vectors, so use \(2, 2\)",
        ),
        ({"addresses": np.zeros(4, np.uint64)}, r"has shape \(4,\)"),
        ({"block_stride_bytes": 0}, "block_stride_bytes is 0; use an integer of 1"),
        ({"token_stride_bytes": 1 << 64}, "token_stride_bytes is 18446744073709551616"),
        ({"head_stride_bytes": 2.0}, r"head_stride_bytes is 2\.0 \(float\)"),
        ({"block_stride_bytes": 3}, "block_stride_bytes is 3, but what it steps over takes 4"),
        ({"token_stride_bytes": 1}, "token_stride_bytes is 1, but what it steps over takes 2"),
        ({"block_stride_bytes": 1 << 62}, "passes the end of the 64-bit address space"),
    ],
)
def test_wrong_views_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        view(**changes)


@pytest.mark.parametrize("num_blocks", [0, -1, 1 << 32, True])
def test_wrong_numbers_of_blocks_are_refused(num_blocks: int) -> None:
    with pytest.raises(InvalidUsage, match=f"num_blocks is {num_blocks}"):
        dataclasses.replace(view(), num_blocks=num_blocks)


def test_heads_that_overlap_are_refused() -> None:
    two = KVShard(dataclasses.replace(LAYOUT, num_kv_heads=2))
    with pytest.raises(
        InvalidUsage, match="token_stride_bytes is 3, but what it steps over takes 4"
    ):
        KVView(
            two,
            1,
            addresses=np.zeros((2, 2), np.uint64),
            block_stride_bytes=8,
            token_stride_bytes=3,
            head_stride_bytes=2,
        )


def test_what_was_checked_cannot_be_changed_afterwards() -> None:
    addresses = np.zeros((2, 2), np.uint64)
    made = view(addresses=addresses)
    addresses[:] = 1 << 63
    assert not made.addresses.any()
    with pytest.raises(ValueError, match="read-only"):
        made.addresses[0, 0] = 9


def test_views_are_compared_by_identity() -> None:
    one = view()
    assert one != view()
    assert len({one, one, view()}) == 2
