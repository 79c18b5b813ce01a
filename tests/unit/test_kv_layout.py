"""KVLayout, TPLayout and KVShard: sizes against hand-made figures, ranks against set algebra."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidUsage
from kvxfer.layout import (
    DTYPE_BYTES,
    KVKind,
    KVLayout,
    KVShard,
    Order,
    TPLayout,
    canonical_dtype,
)

GIB = 1 << 30
SIZES = st.integers(min_value=1, max_value=64)


def llama_8b(**changes: object) -> KVLayout:
    return dataclasses.replace(KVLayout(32, 8, head_dim=128), **changes)


def test_split_sizes_of_llama_8b() -> None:
    layout = llama_8b()
    assert layout.itemsize_bytes == 2
    assert layout.planes_per_layer == 2
    assert layout.num_planes == 64
    assert layout.bytes_per_token_per_layer == 4096
    assert layout.page_bytes == 32768
    assert layout.block_bytes == 2 << 20
    assert layout.bytes_per_token == 131072
    assert layout.request_bytes(8192) == GIB
    assert layout.layer_bytes(8192) == GIB // 32


def test_405b_at_8192_tokens_is_3_9375_gib() -> None:
    assert KVLayout(126, 8, head_dim=128).request_bytes(8192) / GIB == 3.9375


def test_packed_has_one_plane_of_twice_the_page() -> None:
    split, packed = llama_8b(), llama_8b(kv=KVKind.PACKED)
    assert packed.num_planes == 32
    assert packed.page_bytes == 2 * split.page_bytes
    assert packed.block_bytes == split.block_bytes
    assert packed.bytes_per_token == split.bytes_per_token


def test_mla_has_one_latent_a_token() -> None:
    layout = KVLayout(61, 1, head_dim=576, kv=KVKind.MLA)
    assert layout.num_planes == 61
    assert layout.page_bytes == 16 * 576 * 2
    assert layout.bytes_per_token == 70272


@pytest.mark.parametrize(("kv", "planes"), [("head_packed", 32), ("chunked", 64)])
def test_other_kinds_have_the_same_bytes(kv: str, planes: int) -> None:
    split, other = llama_8b(), llama_8b(kv=kv)
    assert other.num_planes == planes
    assert other.page_bytes == split.num_planes * split.page_bytes // planes
    for size in ("block_bytes", "bytes_per_token", "bytes_per_token_per_layer", "vector_bytes"):
        assert getattr(other, size) == getattr(split, size)


def test_vectors() -> None:
    assert (llama_8b().num_vectors, llama_8b().vector_bytes) == (2, 256)
    assert llama_8b(dtype="fp8").vector_bytes == 128
    latent = KVLayout(61, 1, head_dim=576, kv="mla")
    assert (latent.num_vectors, latent.vector_bytes) == (1, 1152)


@pytest.mark.parametrize(
    ("kv", "order", "axes"),
    [
        ("split", "nhd", "layer kv block token head"),
        ("split", "hnd", "layer kv block head token"),
        ("packed", "nhd", "layer block kv token head"),
        ("head_packed", "hnd", "layer block head token kv"),
        ("chunked", "nhd", "block kv layer token head"),
        ("mla", "nhd", "layer kv block token head"),
    ],
)
def test_axes(kv: str, order: str, axes: str) -> None:
    assert KVLayout(2, 1, head_dim=8, kv=kv, order=order).axes == tuple(axes.split())


@given(
    layers=SIZES,
    heads=SIZES,
    dim=SIZES,
    block=SIZES,
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    kv=st.sampled_from([kind for kind in KVKind if kind is not KVKind.MLA]),
)
def test_sizes_equal_those_of_a_numpy_array(
    layers: int, heads: int, dim: int, block: int, dtype: str, kv: KVKind
) -> None:
    layout = KVLayout(layers, heads, head_dim=dim, dtype=dtype, block_size=block, kv=kv)
    one_block = np.broadcast_to(
        np.zeros((), dtype=f"V{DTYPE_BYTES[dtype]}"), (layers, 2, block, heads, dim)
    )
    assert layout.block_bytes == one_block.nbytes
    assert layout.bytes_per_token == one_block[:, :, 0].nbytes
    assert layout.bytes_per_token_per_layer == one_block[0, :, 0].nbytes
    page = one_block[0, 0] if kv in (KVKind.SPLIT, KVKind.CHUNKED) else one_block[0]
    assert layout.page_bytes == page.nbytes


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (8192, 512)])
def test_blocks_are_rounded_up_and_requests_are_not(tokens: int, blocks: int) -> None:
    layout = llama_8b()
    assert layout.num_blocks(tokens) == blocks
    assert layout.request_bytes(tokens) == tokens * 131072


@pytest.mark.parametrize("tokens", [-1, 1.5, True, "8", 1 << 41])
def test_token_counts_are_checked(tokens: object) -> None:
    for method in (KVLayout.num_blocks, KVLayout.request_bytes, KVLayout.layer_bytes):
        with pytest.raises(InvalidUsage, match=r"num_tokens is .*use an integer of 0 \.\."):
            method(llama_8b(), tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("fp32", "float32"),
        ("fp8", "fp8_e4m3"),
        ("BF16", "bfloat16"),
        ("int8", "int8"),
    ],
)
def test_dtype_aliases_become_canonical(alias: str, name: str) -> None:
    assert canonical_dtype(alias) == name
    assert llama_8b(dtype=alias) == llama_8b(dtype=name)


def test_strings_become_enums() -> None:
    layout = llama_8b(order="HND", kv="packed")
    assert layout.order is Order.HND
    assert layout.kv is KVKind.PACKED


def test_numpy_integers_become_python_ones() -> None:
    assert type(llama_8b(num_layers=np.int32(5)).num_layers) is int


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 0, r"num_layers is 0; use an integer of 1 \.\. 16777216"),
        ("num_kv_heads", -3, "num_kv_heads is -3"),
        ("head_dim", 1 << 25, "head_dim is 33554432"),
        ("head_dim", 128.0, r"head_dim is 128\.0 \(float\)"),
        ("block_size", True, r"block_size is True \(bool\)"),
        ("block_size", "16", r"block_size is '16' \(str\)"),
        ("block_size", np.zeros(2, np.int64), "block_size is array"),
        ("dtype", "float7", "dtype is 'float7'; use one of float32, .*bf16"),
        ("dtype", None, "dtype is None"),
        ("order", "dnh", "order is 'dnh'; use one of 'nhd', 'hnd'"),
        ("order", None, "order is None"),
        (
            "kv",
            "both",
            "kv is 'both'; use one of 'split', 'packed', 'head_packed', 'chunked', 'mla'",
        ),
        ("kv", "mla", "num_kv_heads is 8; MLA has one latent"),
        ("windows", (0, 1), "windows has 2 entries for 32 layers; give one a layer, or none"),
        ("windows", (0,) * 31 + (-1,), r"windows\[31\] is -1"),
        ("windows", (0,) * 31 + (1.5,), r"windows\[31\] is 1\.5 \(float\)"),
    ],
)
def test_wrong_fields_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        llama_8b(**{field: value})


def test_a_block_that_64_bits_cannot_hold_is_refused() -> None:
    top = 1 << 24
    with pytest.raises(InvalidUsage, match=r"one block takes \d+ bytes, above the limit"):
        KVLayout(top, top, head_dim=top, block_size=top)


def test_windows_of_all_tokens_are_no_windows() -> None:
    assert llama_8b(windows=(0,) * 32) == llama_8b()
    assert llama_8b(windows=[np.int64(4)] * 32).windows == (4,) * 32


def test_layouts_are_values() -> None:
    assert len({llama_8b(), llama_8b(), llama_8b(block_size=32)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        llama_8b().num_layers = 3  # type: ignore[misc]


# Ranks.


@given(heads=SIZES, tp=SIZES)
def test_heads_of_all_ranks_cover_every_head_in_order(heads: int, tp: int) -> None:
    ranges = [TPLayout(tp, rank).heads_of(heads) for rank in range(tp)]
    assert set().union(*ranges) == set(range(heads))
    assert all(len(each) >= 1 for each in ranges)
    assert ranges == sorted(ranges, key=lambda each: (each.start, each.stop))
    if heads % tp == 0:
        assert sum(map(len, ranges)) == heads
    if tp % heads == 0:
        assert [list(each) for each in ranges] == [[r * heads // tp] for r in range(tp)]


@given(heads=SIZES, tp=SIZES)
def test_a_head_is_shared_only_where_the_boundary_cuts_it(heads: int, tp: int) -> None:
    for rank in range(tp):
        held = set(TPLayout(tp, rank).heads_of(heads))
        # Head h covers [h*tp, (h+1)*tp) and rank r [r*heads, (r+1)*heads) on one common scale.
        touched = {
            h for h in range(heads) if h * tp < (rank + 1) * heads and rank * heads < (h + 1) * tp
        }
        assert held == touched


def test_uneven_heads_by_hand() -> None:
    assert [TPLayout(3, r).heads_of(8) for r in range(3)] == [range(3), range(2, 6), range(5, 8)]
    assert [TPLayout(4, r).heads_of(2) for r in range(4)] == [
        range(1),
        range(1),
        range(1, 2),
        range(1, 2),
    ]


@given(layers=SIZES, pp=SIZES)
def test_layers_are_split_once_and_evenly(layers: int, pp: int) -> None:
    if layers < pp:
        with pytest.raises(InvalidUsage, match=f"pp_size is {pp} for {layers} layers"):
            TPLayout(pp_size=pp).layers_of(layers)
        return
    ranges = [TPLayout(pp_size=pp, pp_rank=rank).layers_of(layers) for rank in range(pp)]
    assert [layer for each in ranges for layer in each] == list(range(layers))
    sizes = [len(each) for each in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] == (1 if layers % pp else 0)


def test_rank_layout() -> None:
    layout = llama_8b()
    assert TPLayout().rank_layout(layout) == layout
    rank = TPLayout(4, 1, pp_size=3, pp_rank=2).rank_layout(layout)
    assert rank == llama_8b(num_layers=10, num_kv_heads=2)
    mla = KVLayout(61, 1, head_dim=576, kv=KVKind.MLA)
    assert TPLayout(8, 5).rank_layout(mla) == mla


def test_a_rank_has_the_windows_of_its_layers() -> None:
    layout = KVLayout(5, 2, head_dim=4, windows=(0, 1, 2, 3, 4))
    assert TPLayout(pp_size=2, pp_rank=1).rank_layout(layout).windows == (3, 4)
    assert TPLayout(pp_size=5).rank_layout(layout).windows == ()


def test_layers_may_be_given() -> None:
    rank = TPLayout(pp_size=2, pp_rank=1, layers=(30, 32))
    assert rank.layers_of(32) == range(30, 32)
    assert rank.rank_layout(llama_8b()).num_layers == 2
    # More stages than layers matter only where they are spread evenly.
    assert TPLayout(pp_size=9, pp_rank=8, layers=(1, 2)).layers_of(2) == range(1, 2)
    with pytest.raises(InvalidUsage, match="layers end at 32 in a model of 31; use at most 31"):
        rank.layers_of(31)


@given(heads=SIZES, layers=SIZES, tp=SIZES, data=st.data())
def test_a_shard_is_its_rank_of_its_model(
    heads: int, layers: int, tp: int, data: st.DataObject
) -> None:
    pp = data.draw(st.integers(1, layers))
    rank = TPLayout(
        tp,
        data.draw(st.integers(0, tp - 1)),
        pp_size=pp,
        pp_rank=data.draw(st.integers(0, pp - 1)),
    )
    model = KVLayout(layers, heads, head_dim=4)
    shard = KVShard(model, rank)
    assert (shard.heads, shard.layers) == (rank.heads_of(heads), rank.layers_of(layers))
    assert shard.layout == rank.rank_layout(model)
    assert (shard.layout.num_kv_heads, shard.layout.num_layers) == (
        len(shard.heads),
        len(shard.layers),
    )


def test_a_shard_is_by_default_all_of_its_model() -> None:
    shard = KVShard(llama_8b())
    assert (shard.layout, shard.heads, shard.layers) == (llama_8b(), range(8), range(32))
    assert shard == KVShard(llama_8b(), TPLayout())
    assert shard != KVShard(llama_8b(), TPLayout(2))


def test_every_shard_of_a_latent_model_holds_the_latent() -> None:
    model = KVLayout(61, 1, head_dim=576, kv="mla")
    assert all(KVShard(model, TPLayout(8, rank)).heads == range(1) for rank in range(8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_size": 0}, "tp_size is 0"),
        ({"tp_size": 2, "tp_rank": 2}, r"tp_rank is 2; use an integer of 0 \.\. 1"),
        ({"tp_rank": -1}, "tp_rank is -1"),
        ({"pp_size": 2, "pp_rank": 2}, "pp_rank is 2"),
        ({"pp_size": 1.0}, r"pp_size is 1\.0"),
        ({"layers": (3, 3)}, r"layers\[0\] is 3; use an integer of 0 \.\. 2"),
        ({"layers": (-1, 3)}, r"layers\[0\] is -1"),
        ({"layers": (0, 0)}, r"layers\[1\] is 0"),
        ({"layers": (0, 1.5)}, r"layers\[1\] is 1\.5"),
        ({"layers": (0, 1, 2)}, r"layers is \(0, 1, 2\); use \(first, end\)"),
        ({"layers": 5}, r"layers is 5; use \(first, end\)"),
    ],
)
def test_wrong_ranks_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        TPLayout(**arguments)
