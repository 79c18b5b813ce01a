"""What vLLM hands to its connector, without vLLM: tensors, requests and steps."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray


class FakeTensor:
    """The part of torch's tensor that the connector uses, over a numpy array."""

    def __init__(self, array: NDArray[Any], dtype: str = "torch.float32") -> None:
        self.array = array
        self.dtype = dtype
        self.shape = array.shape
        self.__array_interface__ = array.__array_interface__

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def permute(self, *axes: int) -> "FakeTensor":
        return FakeTensor(self.array.transpose(axes), self.dtype)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def reshape(self, *shape: int) -> "FakeTensor":
        view = self.array.reshape(shape)
        assert np.shares_memory(view, self.array)
        return FakeTensor(view, self.dtype)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)


def tensor(*shape: int, order: Sequence[int] | None = None) -> FakeTensor:
    """A cache of zeros whose axes lie in memory in ``order``, slowest first."""
    order = range(len(shape)) if order is None else order
    flat = np.zeros([shape[axis] for axis in order], np.float32)
    return FakeTensor(flat.transpose(np.argsort(order)))


def layer_names(number: int) -> list[str]:
    return [f"model.layers.{layer}.self_attn.attn" for layer in range(number)]


def request(
    request_id: str,
    params: object,
    *,
    num_prompt_tokens: int = 100,
    status: str = "FINISHED_LENGTH_CAPPED",
    prompt_logprobs: int | None = None,
) -> Any:
    """A ``vllm.v1.request.Request``, with what the connector reads of one."""
    return SimpleNamespace(
        request_id=request_id,
        kv_transfer_params=params,
        num_prompt_tokens=num_prompt_tokens,
        sampling_params=SimpleNamespace(prompt_logprobs=prompt_logprobs),
        status=SimpleNamespace(name=status),
    )


def blocks(*groups: Sequence[int]) -> Any:
    """``KVCacheBlocks`` of a request."""
    return SimpleNamespace(get_block_ids=lambda: tuple(list(group) for group in groups))


def step(
    *,
    new: Mapping[str, tuple[Sequence[int], int, int]] | None = None,
    cached: Mapping[str, tuple[Sequence[int] | None, int, int]] | None = None,
    resumed: Sequence[str] = (),
    preempted: Sequence[str] = (),
) -> Any:
    """A ``SchedulerOutput``: (block ids, computed tokens, scheduled tokens) by request."""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(list(ids),), num_computed_tokens=computed)
            for name, (ids, computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            resumed_req_ids=set(resumed),
            new_block_ids=[None if ids is None else (list(ids),) for ids, _, _ in cached.values()],
            num_computed_tokens=[computed for _, computed, _ in cached.values()],
        ),
        num_scheduled_tokens={
            name: scheduled for name, (_, _, scheduled) in {**new, **cached}.items()
        },
        preempted_req_ids=set(preempted),
    )


def finished(*, recving: Sequence[str] = (), sending: Sequence[str] = ()) -> Any:
    """A ``KVConnectorOutput``."""
    return SimpleNamespace(finished_recving=set(recving), finished_sending=set(sending))


def send_params(transfer_id: str, *addresses: Mapping[str, str]) -> dict[str, Any]:
    receivers = [dict(one) for one in addresses] or [{"init": "tcp://h:1", "alloc": "tcp://h:2"}]
    return {"kvxfer": {"role": "send", "transfer_id": transfer_id, "receivers": receivers}}


def receive_params(transfer_id: str) -> dict[str, Any]:
    return {"kvxfer": {"role": "receive", "transfer_id": transfer_id}}
