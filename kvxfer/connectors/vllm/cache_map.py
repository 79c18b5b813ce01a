"""vLLM's caches as a kvxfer cache: the layout of the whole model, and this worker's part of it.

CPU kernels keep K of a block transposed (``cpu_attn_reshape_and_cache``), which no stride says:
such blocks are copied whole, as one unit each (`Pages`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvxfer.connectors.vllm.layer_cache import (
    LayerCache,
    Tensor,
    in_memory_order,
    read_tensor,
    text_of,
)
from kvxfer.connectors.vllm.pages import PLAIN, Pages
from kvxfer.errors import InvalidUsage, LayoutMismatch
from kvxfer.layout import KVKind, KVLayout, Order, TPLayout

_WHOLE_BLOCKS = ((KVKind.HEAD_PACKED, Order.HND), (KVKind.MLA, Order.NHD))


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Which part of which model a worker holds.

    Attributes:
        num_layers: layers of the whole model.
        num_kv_heads: KV heads of the whole model; 1 for MLA.
        block_tokens: tokens in a block of the scheduler.
        is_mla: its cache holds latents.
        rank: which of the ranks; ``layers`` of it is worked out here.
        page_format: in what order the kernels keep a block's tokens: `PLAIN`, or a name for one
            that is their own.
        groups: for each layer, by vLLM's name, which of the scheduler's block tables it has.
        windows: for each layer that slides the tokens that it looks back, its own included.
    """

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    is_mla: bool = False
    rank: TPLayout = field(default_factory=TPLayout)
    page_format: str = PLAIN
    groups: Mapping[str, int] = field(default_factory=dict)
    windows: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheMap:
    """What ``KVCache`` takes, and how vLLM names it.

    Attributes:
        layout: of the whole model.
        rank: which part of it this worker holds.
        arrays: one a layer, its axes in the order in which they lie.
        layer_of: the number of each layer in the whole model, by vLLM's name.
        pages: how it divides the scheduler's blocks.
    """

    layout: KVLayout
    rank: TPLayout
    arrays: list[Any]
    layer_of: dict[str, int]
    pages: Pages


def map_caches(caches: Mapping[str, Tensor], part: ModelPart) -> CacheMap:
    """Find the layout of a worker's caches.

    Args:
        caches: vLLM's cache tensor of each layer, by name; a layer that shares the cache of
            another one of its group is left out.
        part: what they are of.

    Raises:
        InvalidUsage: shapes or strides that no layout of kvxfer describes, or layers that differ.
    """
    own = _without_shared(caches, part.groups)
    if not own:
        raise InvalidUsage("vLLM has registered no KV cache; nothing can be handed over")
    names = list(own)
    _require_alike(own)
    first = read_tensor(own[names[0]], is_mla=part.is_mla)
    _require_heads(first, part)
    arrays = [in_memory_order(name, tensor) for name, tensor in own.items()]
    if part.page_format != PLAIN:
        arrays = [array.reshape(-1) for array in arrays]
    pages = _pages(first, part)
    layer_of = dict(zip(names, _numbers(names, part), strict=True))
    return CacheMap(
        _layout(first, names, pages, part), _rank(layer_of, part), arrays, layer_of, pages
    )


def _without_shared(caches: Mapping[str, Tensor], groups: Mapping[str, int]) -> dict[str, Tensor]:
    """One layer of those that share a cache, all in the order of the model."""
    own: dict[tuple[int, int], str] = {}
    for name in sorted(caches, key=_name_key):
        own.setdefault((caches[name].data_ptr(), groups.get(name, 0)), name)
    return {name: caches[name] for name in own.values()}


def _name_key(name: str) -> tuple[list[int], str]:
    """The numbers in a layer's name, then the name itself."""
    return [int(digits) for digits in re.findall(r"(?<=\.)\d+(?=\.|$)", name)], name


def _require_alike(caches: Mapping[str, Tensor]) -> None:
    forms = {name: text_of(tensor) for name, tensor in caches.items()}
    (name, form), *rest = forms.items()
    for other, other_form in rest:
        if other_form != form:
            raise LayoutMismatch(
                f"layer {other} has a cache of {other_form}, layer {name} of {form}; kvxfer hands "
                "over models whose layers are alike"
            )


def _require_heads(layer: LayerCache, part: ModelPart) -> None:
    heads = 1 if part.is_mla else len(part.rank.heads_of(part.num_kv_heads))
    if layer.num_heads != heads:
        raise InvalidUsage(
            f"the cache has {layer.num_heads} heads; rank {part.rank.tp_rank} of "
            f"{part.rank.tp_size} of a model with {part.num_kv_heads} KV heads holds {heads}"
        )


def _pages(layer: LayerCache, part: ModelPart) -> Pages:
    if part.block_tokens % layer.block_tokens:
        raise InvalidUsage(
            f"the scheduler's blocks hold {part.block_tokens} tokens, the cache's "
            f"{layer.block_tokens}; the first must be a multiple of the second"
        )
    ratio = part.block_tokens // layer.block_tokens
    if part.page_format == PLAIN:
        return Pages(layer.block_tokens, ratio=ratio)
    if (layer.kv, layer.order) not in _WHOLE_BLOCKS:
        raise InvalidUsage(
            f"{part.page_format} pages in a cache of layout {layer.kv.value}, {layer.order.value}; "
            "kvxfer takes such pages as head_packed, hnd, or of MLA"
        )
    return Pages(1, layer.block_tokens, ratio, part.page_format)


def _layout(layer: LayerCache, names: Sequence[str], pages: Pages, part: ModelPart) -> KVLayout:
    # A token that is computed looks at itself and the window before it, so that of those that are
    # there already one less is needed.
    windows = [pages.windows(max(part.windows.get(name, 0) - 1, 0)) for name in names]
    groups = [part.groups.get(name, 0) for name in names]
    if part.rank.pp_size > 1 and (any(windows) or any(groups)):
        raise InvalidUsage(
            "pipeline parallelism with layers of several kinds is not handed over; use tensor "
            "parallelism alone"
        )
    return KVLayout(
        part.num_layers,
        part.num_kv_heads,
        head_dim=layer.head_dim * pages.unit_tokens,
        dtype=layer.dtype,
        block_size=pages.block_units,
        order=layer.order,
        kv=layer.kv,
        windows=tuple(windows) if any(windows) else (),
        groups=tuple(groups) if any(groups) else (),
    )


def _numbers(names: Sequence[str], part: ModelPart) -> list[int]:
    """Each layer's number in the whole model."""
    if part.rank.pp_size == 1:
        return list(range(len(names)))
    numbers = [_name_key(name)[0][0] if _name_key(name)[0] else -1 for name in names]
    if numbers != list(range(numbers[0], numbers[0] + len(names))):
        raise InvalidUsage(
            f"layers {', '.join(names[:4])}, ... of pipeline rank {part.rank.pp_rank} are not "
            "numbered in a row; kvxfer cannot tell which part of the model they are"
        )
    return numbers


def _rank(layer_of: Mapping[str, int], part: ModelPart) -> TPLayout:
    if part.rank.pp_size == 1:
        return part.rank
    numbers = list(layer_of.values())
    return replace(part.rank, layers=(numbers[0], numbers[-1] + 1))
