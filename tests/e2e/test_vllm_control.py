"""KV that a test takes from one engine and gives to the other: right, and with one block wrong."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllm_engines import BLOCK_TOKENS, TINY, Pair, texts
from vllm_fakes import receive_params, send_params
from vllm_stand_in import NUM_BLOCKS, unit_layout

from kvxfer import KVCache, Receiver, Sender
from kvxfer.connectors.vllm.params import attempt_id

LENGTH = 5 * BLOCK_TOKENS + 60
NUM_UNITS = 6
Pages = NDArray[np.float32]  # [layer, block, head, K|V, elements of a block]


class Between:
    """A receiver for the one engine and a sender to the other, over one cache."""

    def __init__(self, pair: Pair, stack: ExitStack) -> None:
        self._pair = pair
        layout = unit_layout()
        self._memory = np.zeros(NUM_BLOCKS * layout.block_bytes // 4, np.float32)
        cache = stack.enter_context(KVCache(layout, self._memory))
        self._receiver = stack.enter_context(Receiver(cache, transport=pair.transport))
        self._sender = stack.enter_context(Sender(cache, transport=pair.transport))

    def relay(self, body: dict[str, Any], change: Callable[[Pages, list[int]], None]) -> Any:
        """The decode engine's reply with KV that ``change`` has had in its hands."""
        taken, given = self._pair.new_id(), self._pair.new_id()
        params = send_params(taken, self._receiver.addresses)
        self._pair.prefill.ask({**body, "max_tokens": 1, "kv_transfer_params": params})
        notice = self._receiver.poll(20.0)
        assert notice is not None
        assert notice.ok, notice.reason
        blocks = list(notice.block_ids)
        layers, heads = TINY["num_layers"], TINY["num_kv_heads"]
        change(self._memory.reshape(layers, NUM_BLOCKS, heads, 2, -1), blocks)
        name = attempt_id(given, 1, self._pair.prefill.page_format())
        handle = self._sender.send(name, blocks, to=self._pair.addresses, tokens=range(NUM_UNITS))
        reply = self._pair.decode.ask({**body, "kv_transfer_params": receive_params(given)})
        handle.wait(20.0)
        self._receiver.release(notice.request_id)
        return reply


@pytest.fixture
def between(pair: Pair) -> Iterator[Between]:
    with ExitStack() as stack:
        yield Between(pair, stack)


def nothing(pages: Pages, blocks: list[int]) -> None:
    """Leave all as it is."""


def zero(pages: Pages, blocks: list[int]) -> None:
    pages[:, blocks[2]] = 0


def swap(pages: Pages, blocks: list[int]) -> None:
    """With another layer's: two whole blocks of one layer may change places, since attention takes
    its keys, rotated when they were stored, in any order."""
    pages[[1, 2], blocks[3]] = pages[[2, 1], blocks[3]]


def shift(pages: Pages, blocks: list[int]) -> None:
    pages[:, blocks[2]] = np.roll(pages[:, blocks[2]], 1, axis=-1)


def swap_heads(pages: Pages, blocks: list[int]) -> None:
    pages[:, blocks] = pages[:, blocks][:, :, ::-1]


def one_layer(pages: Pages, blocks: list[int]) -> None:
    pages[2, blocks[4]] = 0


def test_kv_that_was_not_changed_gives_the_same_tokens(pair: Pair, between: Between) -> None:
    body = _body(1)
    assert texts(between.relay(body, nothing)) == texts(pair.alone(body))


CHANGES = [zero, swap, shift, swap_heads, one_layer]


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_is_wrong_gives_other_tokens(
    pair: Pair, between: Between, change: Callable[[Pages, list[int]], None]
) -> None:
    body = _body(2 + CHANGES.index(change))
    assert texts(between.relay(body, change)) != texts(pair.alone(body))


def _body(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 8000, LENGTH).tolist()
    return {"prompt": tokens, "max_tokens": 16, "temperature": 0}
