"""Sides of a transfer as people write them."""

import pytest

from kvxfer.cli.side_spec import PRESETS, Side, parse_side
from kvxfer.errors import InvalidUsage
from kvxfer.layout import CATALOGUE, KVKind, Order


def test_every_key_is_read() -> None:
    side = parse_side("tp=2,pp=3,order=hnd,kv=head_packed,block=64,dtype=fp8")
    assert side == Side(
        tp=2, pp=3, order=Order.HND, kv=KVKind.HEAD_PACKED, block_size=64, dtype="fp8_e4m3"
    )


def test_what_is_not_named_comes_from_the_defaults() -> None:
    defaults = Side(tp=4, order=Order.HND, block_size=32)
    assert parse_side("", defaults=defaults) == parse_side("  ", defaults=defaults) == defaults
    assert parse_side("block=64", defaults=defaults) == Side(tp=4, order=Order.HND, block_size=64)
    assert parse_side("") == Side()


def test_case_and_blanks_do_not_matter() -> None:
    assert parse_side(" TP = 2 , Order=HND ") == Side(tp=2, order=Order.HND)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_the_layout_and_keys_change_it(name: str) -> None:
    preset = PRESETS[name]
    side = parse_side(f"{name},tp=2")
    assert (side.order, side.kv, side.block_size) == (preset.order, preset.kv, preset.block_size)
    assert (side.tp, side.dtype) == (2, "bfloat16")
    assert parse_side(f"{name},block=8").block_size == 8
    assert preset.source


@pytest.mark.parametrize("name", PRESETS)
def test_the_text_of_a_side_is_that_side(name: str) -> None:
    side = parse_side(f"{name},tp=2,pp=2,dtype=fp16")
    assert parse_side(str(side)) == side


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=0", r"--src: tp is '0'; use 1 \.\. 256"),
        ("tp=257", r"tp is '257'"),
        ("pp=-1", r"pp is '-1'; use 1 \.\. 256"),
        ("tp=", "tp is ''"),
        ("tp=two", "tp is 'two'"),
        ("tp=٢", "tp is '٢'"),
        ("block=0", r"block is '0'; use 1 \.\. 1048576"),
        ("order=dhn", "order is 'dhn'; use nhd, hnd"),
        ("kv=mla", "kv is 'mla'; use split, packed, head_packed, chunked$"),
        ("dtype=int3", "--src: dtype is 'int3'; use one of float32"),
        ("heads=8", "'heads' is no key; use tp, pp, order, kv, block, dtype"),
        ("tp=2,tp=4", "tp is given twice"),
        ("trtllm", "'trtllm' is no key=value; the first item may be vllm-gpu"),
        ("tp=1,lmcache", "'lmcache' comes first"),
        ("tp=1,", "'' is no key=value"),
        ("x" * 1000, "is no key=value"),
    ],
)
def test_wrong_sides_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message) as caught:
        parse_side(text, option="--src")
    assert len(str(caught.value)) < 300


def test_the_layout_is_the_models_in_this_sides_form() -> None:
    model = CATALOGUE["gpt-oss-120b"].kv_layout(windowed=True)
    layout = parse_side("vllm-cpu,dtype=fp8").layout(model)
    assert (layout.order, layout.kv, layout.block_size) == (Order.HND, KVKind.HEAD_PACKED, 128)
    assert (layout.windows, layout.num_kv_heads) == (model.windows, model.num_kv_heads)
    assert layout.dtype == "fp8_e4m3"


def test_latents_stay_latents_and_have_no_chunks() -> None:
    model = CATALOGUE["deepseek-v3"].kv_layout()
    assert parse_side("vllm-0.32").layout(model).kv is KVKind.MLA
    with pytest.raises(InvalidUsage, match=r"lmcache is kv=chunked, which .* another preset"):
        parse_side("lmcache").layout(model)


def test_ranks_are_the_grid() -> None:
    ranks = parse_side("tp=2,pp=2").ranks()
    assert [(rank.pp_rank, rank.tp_rank) for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(rank.pp_size, rank.tp_size) for rank in ranks} == {(2, 2)}
