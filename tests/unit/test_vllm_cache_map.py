"""vLLM's cache tensors as a kvxfer cache: every shape that it has, and those that are refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllm_fakes import FakeTensor, layer_names, tensor

from kvxfer.connectors.vllm.cache_map import CacheMap, ModelPart, map_caches
from kvxfer.connectors.vllm.pages import Pages
from kvxfer.errors import InvalidUsage, LayoutMismatch
from kvxfer.layout import KVKind, Order, TPLayout
from kvxfer.memory import KVCache

BLOCKS, SIZE, HEADS, DIM, LAYERS = 5, 16, 3, 8, 2
PART = ModelPart(LAYERS, HEADS, SIZE)
# What vLLM's backends have: the shape that they index, and the order in which it lies.
SPLIT, PACKED, SIDE_BY_SIDE = KVKind.SPLIT, KVKind.PACKED, KVKind.HEAD_PACKED
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], KVKind, Order]] = {
    "flash-attention": ((BLOCKS, 2, SIZE, HEADS, DIM), (0, 1, 2, 3, 4), PACKED, Order.NHD),
    "the same, HND": ((BLOCKS, 2, SIZE, HEADS, DIM), (0, 1, 3, 2, 4), PACKED, Order.HND),
    "K apart from V": ((2, BLOCKS, SIZE, HEADS, DIM), (0, 1, 2, 3, 4), SPLIT, Order.NHD),
    "the same again, HND": (
        (2, BLOCKS, SIZE, HEADS, DIM),
        (0, 1, 3, 2, 4),
        KVKind.SPLIT,
        Order.HND,
    ),
    "from 0.29, LBHNC": (
        (BLOCKS, HEADS, SIZE, 2 * DIM),
        (0, 1, 2, 3),
        KVKind.HEAD_PACKED,
        Order.HND,
    ),
    "from 0.29, LBNHC": (
        (BLOCKS, HEADS, SIZE, 2 * DIM),
        (0, 2, 1, 3),
        KVKind.HEAD_PACKED,
        Order.NHD,
    ),
}


def caches(shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> dict[str, FakeTensor]:
    return {name: tensor(*shape, order=order) for name in layer_names(LAYERS)}


def mapped(found: Mapping[str, Any], part: ModelPart = PART) -> CacheMap:
    return map_caches(found, part)


@pytest.mark.parametrize("name", SHAPES)
def test_each_backend_has_its_layout(name: str) -> None:
    shape, order, kind, inner = SHAPES[name]
    layout = mapped(caches(shape, order)).layout
    assert (layout.kv, layout.order) == (kind, inner)
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (LAYERS, HEADS, DIM)
    assert (layout.block_size, layout.dtype) == (SIZE, "float32")


@pytest.mark.parametrize("name", SHAPES)
def test_an_element_lies_where_the_view_says(name: str) -> None:
    shape, order, kind, _ = SHAPES[name]
    found = caches(shape, order)
    made = mapped(found)
    block, token, head, element = 3, 5, 2, 7
    with KVCache(made.layout, made.arrays) as cache:
        view = cache.view
        for layer, one in enumerate(found.values()):
            for vector in (0, 1):
                index = {
                    5: (block, vector, token, head, element),
                    4: (block, head, token, vector * DIM + element),
                }[len(shape)]
                if kind is SPLIT:
                    index = (vector, block, token, head, element)
                one.array[index] = 1.0
                offset = int(view.addresses[layer, vector]) - one.data_ptr()
                offset += block * view.block_stride_bytes + token * view.token_stride_bytes
                offset += head * view.head_stride_bytes + element * 4
                flat = np.frombuffer(_bytes_of(one), np.float32)
                assert np.flatnonzero(flat).tolist() == [offset // 4]
                one.array[index] = 0.0


def _bytes_of(one: FakeTensor) -> bytes:
    order = np.argsort([-step for step in one.array.strides], kind="stable")
    return one.array.transpose(order).tobytes()


@pytest.mark.parametrize("shape", [(BLOCKS, SIZE, 72), (BLOCKS, 1, SIZE, 72)])
def test_latents_of_mla_are_one_head(shape: tuple[int, ...]) -> None:
    part = replace(PART, num_kv_heads=1, is_mla=True, rank=TPLayout(4, 3))
    layout = mapped(caches(shape), part).layout
    assert (layout.kv, layout.head_dim, layout.block_size) == (KVKind.MLA, 72, SIZE)


def test_layers_come_in_the_order_of_the_model() -> None:
    names = layer_names(12)
    found = {name: tensor(BLOCKS, 2, SIZE, HEADS, DIM) for name in reversed(names)}
    made = mapped(found, replace(PART, num_layers=12))
    assert made.layer_of == {name: number for number, name in enumerate(names)}
    assert [array.data_ptr() for array in made.arrays] == [found[name].data_ptr() for name in names]


def test_a_layer_that_shares_a_cache_is_left_out() -> None:
    first, second = layer_names(2)
    shared = tensor(BLOCKS, 2, SIZE, HEADS, DIM)
    made = mapped({first: shared, second: shared}, replace(PART, num_layers=1))
    assert made.layer_of == {first: 0}


def test_layers_of_two_groups_may_share_a_cache() -> None:
    names = layer_names(2)
    shared = tensor(BLOCKS, 2, SIZE, HEADS, DIM)
    part = replace(PART, groups={names[0]: 0, names[1]: 1}, windows={names[1]: 33})
    made = mapped(dict.fromkeys(names, shared), part)
    assert (made.layout.groups, made.layout.windows) == ((0, 1), (0, 32))
    with KVCache(made.layout, made.arrays) as cache:
        assert cache.num_blocks == BLOCKS


def test_a_rank_of_a_pipeline_has_the_layers_that_its_names_say() -> None:
    found = {f"model.layers.{n}.attn": tensor(BLOCKS, 2, SIZE, HEADS, DIM) for n in (4, 5)}
    part = replace(PART, num_layers=6, rank=TPLayout(pp_size=3, pp_rank=2))
    made = mapped(found, part)
    assert (made.layout.num_layers, made.rank.layers) == (6, (4, 6))
    assert list(made.layer_of.values()) == [4, 5]


def test_kernels_may_take_smaller_blocks_than_the_scheduler_hands_out() -> None:
    made = mapped(caches((BLOCKS * 4, 2, SIZE, HEADS, DIM)), replace(PART, block_tokens=4 * SIZE))
    assert (made.layout.block_size, made.pages) == (SIZE, Pages(SIZE, ratio=4))


def test_pages_of_a_cpu_are_copied_whole() -> None:
    found = caches((BLOCKS, HEADS, 128, 2 * DIM))
    made = mapped(found, replace(PART, block_tokens=128, page_format="cpu-vec"))
    assert (made.layout.block_size, made.layout.head_dim) == (1, 128 * DIM)
    assert made.pages == Pages(1, 128, 1, "cpu-vec")
    with KVCache(made.layout, made.arrays) as cache:
        head_bytes = 2 * 128 * DIM * 4
        assert cache.num_blocks == BLOCKS
        assert cache.view.head_stride_bytes == head_bytes
        assert cache.view.block_stride_bytes == HEADS * head_bytes


@pytest.mark.parametrize(
    ("found", "part", "named"),
    [
        ({}, PART, "no KV cache"),
        (caches((BLOCKS, SIZE, HEADS)), PART, "none that kvxfer knows"),
        (caches((BLOCKS, 3, SIZE, HEADS, DIM)), PART, "none that kvxfer knows"),
        (caches((BLOCKS, 2, SIZE, HEADS, DIM), (2, 0, 1, 3, 4)), PART, "in the order token, block"),
        (caches((BLOCKS, 2, SIZE, 4, DIM)), PART, "has 4 heads"),
        (caches((BLOCKS, 2, SIZE, HEADS, DIM)), replace(PART, block_tokens=24), "24 tokens"),
        (
            caches((BLOCKS, 2, SIZE, HEADS, DIM)),
            replace(PART, page_format="cpu-vec"),
            "cpu-vec pages in a cache of layout packed",
        ),
        (
            {f"a.layers.{n}.x": tensor(BLOCKS, 2, SIZE, HEADS, DIM) for n in (1, 3)},
            replace(PART, rank=TPLayout(pp_size=2, pp_rank=1)),
            "not numbered in a row",
        ),
    ],
)
def test_what_no_layout_describes_is_refused(
    found: Mapping[str, Any], part: ModelPart, named: str
) -> None:
    with pytest.raises(InvalidUsage, match=named):
        mapped(found, part)


def test_layers_that_differ_are_refused_by_name() -> None:
    first, second = layer_names(2)
    found = {first: tensor(BLOCKS, 2, SIZE, 3, DIM), second: tensor(BLOCKS, 2, SIZE, 6, DIM)}
    with pytest.raises(LayoutMismatch, match=second):
        mapped(found)


def test_a_cache_with_gaps_is_refused() -> None:
    both = np.zeros((BLOCKS, LAYERS, HEADS, SIZE, 2 * DIM), np.float32)
    found = {name: FakeTensor(both[:, layer]) for layer, name in enumerate(layer_names(LAYERS))}
    with pytest.raises(InvalidUsage, match="with gaps"):
        mapped(found)
