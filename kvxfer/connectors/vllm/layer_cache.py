"""What one of vLLM's cache tensors holds: which axis is which, and in what order they lie.

What vLLM hands over (0.25 to 0.32) is told apart by the number of axes, their meaning is fixed:

* 5, the second of length 2: (block, K|V, token, head, element), FlashAttention and its like;
* 5, the first of length 2: (K|V, block, token, head, element), older ones;
* 4: (block, head, token, K and V side by side), CPUs, and all backends from 0.29 on;
* 3, or 4 with one head, of a model with MLA: (block, [head,] token, latent).

In which order they lie in memory, NHD or HND, the strides say.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVKind, Order

_DTYPES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
_KINDS = {
    ("kv", "block"): KVKind.SPLIT,
    ("block", "kv"): KVKind.PACKED,
    ("block",): KVKind.HEAD_PACKED,
}


class Tensor(Protocol):
    """What is used of a torch tensor."""

    dtype: Any
    shape: Sequence[int]

    def stride(self) -> Sequence[int]:
        """Elements from one entry of each axis to the next."""

    def permute(self, *axes: int) -> "Tensor":
        """The same memory with its axes in another order."""

    def is_contiguous(self) -> bool:
        """Whether it lies in memory in the order of its axes, without gaps."""

    def reshape(self, *shape: int) -> "Tensor":
        """The same memory with other axes, of a contiguous tensor."""

    def data_ptr(self) -> int:
        """Where it begins."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer.

    Attributes:
        kv: how K and V lie.
        order: of tokens and heads.
        dtype: a name of ``kvxfer.layout.DTYPE_BYTES``.
        num_heads: KV heads of this rank; 1 for MLA.
        head_dim: elements of K, of V or of a latent.
        block_tokens: tokens of a block.
    """

    kv: KVKind
    order: Order
    dtype: str
    num_heads: int
    head_dim: int
    block_tokens: int


def read_tensor(tensor: Tensor, *, is_mla: bool) -> LayerCache:
    """What ``tensor`` holds.

    Args:
        tensor: vLLM's cache of a layer.
        is_mla: it holds latents.

    Raises:
        InvalidUsage: axes or an order of them that kvxfer does not know.
    """
    axes = _axes(tuple(tensor.shape), is_mla)
    if not axes:
        raise InvalidUsage(
            f"a cache of {text_of(tensor)} is none that kvxfer knows; use an attention backend "
            "whose cache holds K and V of each token, or the latents of MLA"
        )
    sizes = dict(zip(axes, tensor.shape, strict=True))
    in_memory = [axes[axis] for axis in memory_order(tensor)]
    inner = [axis for axis in in_memory if axis in ("token", "head")]
    outer = tuple(axis for axis in in_memory if axis in ("kv", "block"))
    kind = KVKind.MLA if is_mla else _KINDS.get(outer)
    if kind is None or in_memory != [*outer, *inner, "element"]:
        raise InvalidUsage(
            f"a cache of {text_of(tensor)} has its axes in the order {', '.join(in_memory)}, which "
            "kvxfer does not know; set VLLM_KV_CACHE_LAYOUT=NHD or HND"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    return LayerCache(
        kv=kind,
        order=Order.HND if inner == ["head", "token"] and not is_mla else Order.NHD,
        dtype=_DTYPES.get(dtype, dtype),
        num_heads=sizes.get("head", 1),
        head_dim=sizes["element"] // (2 if kind is KVKind.HEAD_PACKED else 1),
        block_tokens=sizes["token"],
    )


def in_memory_order(name: str, tensor: Tensor) -> Tensor:
    """The cache of layer ``name`` with its axes from the slowest to the fastest.

    Raises:
        InvalidUsage: it lies in several pieces.
    """
    array = tensor.permute(*memory_order(tensor))
    if not array.is_contiguous():
        raise InvalidUsage(
            f"the cache of layer {name} is {text_of(tensor)}, with gaps; kvxfer takes caches in "
            "which each layer lies in one piece (VLLM_KV_CACHE_LAYOUT=NHD or HND)"
        )
    return array


def memory_order(tensor: Tensor) -> list[int]:
    """The axes from the slowest to the fastest."""
    stride = tensor.stride()
    return sorted(range(len(tensor.shape)), key=lambda axis: -stride[axis])


def text_of(tensor: Tensor) -> str:
    """A tensor as errors describe it."""
    return f"shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())} and {tensor.dtype}"


def _axes(shape: tuple[int, ...], is_mla: bool) -> tuple[str, ...]:
    """The names of the axes; none where they are not known."""
    if is_mla:
        if len(shape) == 3:
            return ("block", "token", "element")
        return ("block", "head", "token", "element") if shape[1:2] == (1,) else ()
    if len(shape) == 5 and shape[1] == 2:
        return ("block", "kv", "token", "head", "element")
    if len(shape) == 5 and shape[0] == 2:
        return ("kv", "block", "token", "head", "element")
    if len(shape) == 4 and shape[3] % 2 == 0:
        return ("block", "head", "token", "element")
    return ()
