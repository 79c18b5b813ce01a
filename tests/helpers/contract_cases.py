"""Requests moved between parallel layouts that both sides of a contract test know by name.

Caches without gaps, whose arrays begin at multiples of 16 bytes. What differs is in the name.
"""

from typing import Any

from reshard_cases import Case, Model, Side

MODEL = Model(num_layers=4, num_heads=4, head_dim=8)
NUM_TOKENS = 48


def _side(model: Model, block_ids: tuple[int, ...], **fields: Any) -> Side:
    return Side(
        **{
            "model": model,
            "dtype": model.dtype,
            "tp_size": 1,
            "stages": 1,
            "kind": "split",
            "order": "nhd",
            "block_size": 16,
            "num_blocks": max(block_ids) + 2,
            "block_ids": block_ids,
        }
        | fields
    )


def _case(
    src: dict[str, Any],
    dst: dict[str, Any],
    *,
    model: Model = MODEL,
    tokens: range = range(NUM_TOKENS),
    layers: tuple[int, ...] | None = None,
    scales: str | None = None,
) -> Case:
    src = {"block_ids": (5, 0, 2)} | src
    dst = {"block_ids": (1, 4, 3)} | dst
    return Case(model, _side(model, **src), _side(model, **dst), tokens, layers, scales)


CASES = {
    "tp 1 to 2": _case({}, {"tp_size": 2}),
    "tp 2 to 1": _case({"tp_size": 2}, {}),
    "tp 3 to 2, heads cut": _case({"tp_size": 3}, {"tp_size": 2}),
    "tp 4 to 3, heads held twice": _case(
        {"tp_size": 4}, {"tp_size": 3}, model=Model(num_layers=4, num_heads=2, head_dim=8)
    ),
    "pp 2 to 1": _case({"stages": 2}, {}),
    "pp 2 x tp 2 to uneven stages": _case(
        {"stages": 2, "tp_size": 2}, {"stages": (1, 4), "tp_size": 1}
    ),
    "nhd to hnd": _case({}, {"order": "hnd", "tp_size": 2}),
    "hnd head-packed to nhd packed": _case(
        {"order": "hnd", "kind": "head_packed", "tp_size": 2}, {"kind": "packed"}
    ),
    "split to chunked": _case({"tp_size": 2}, {"kind": "chunked", "order": "hnd"}),
    "blocks of 16 to 64, a part of them": _case(
        {"block_ids": (7, 1, 0, 4, 2, 6)},
        {"block_ids": (2, 0), "block_size": 64, "tp_size": 2},
        tokens=range(21, 91),
    ),
    "blocks of 64 to 16": _case(
        {"block_ids": (2,), "block_size": 64}, {"block_ids": (1, 4, 3, 0)}, tokens=range(3, 64)
    ),
    "windows, and a table that begins later": _case(
        {"tp_size": 2},
        {"block_ids": (1, 4), "first_token": 16},
        model=Model(num_layers=4, num_heads=4, head_dim=8, windows=(0, 20, 0, 5)),
        tokens=range(16, 47),
    ),
    "latents, one sender a layer": _case(
        {"kind": "mla", "tp_size": 2},
        {"kind": "mla", "tp_size": 3},
        model=Model(num_layers=4, num_heads=1, head_dim=24, mla=True),
    ),
    "two layers": _case({"tp_size": 2}, {"tp_size": 1}, layers=(1, 2)),
    "fp8, a scale a layer": _case(
        {"tp_size": 2}, {"dtype": "fp8_e4m3", "order": "hnd"}, scales="layer"
    ),
    "fp8, a scale a head": _case(
        {"order": "hnd"}, {"dtype": "fp8_e4m3", "tp_size": 3}, scales="head"
    ),
}
