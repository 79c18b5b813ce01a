"""Requests that several ranks write, or that one rank writes to several."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from cache_content import private_array

from kvxfer import KVCache, KVLayout
from kvxfer.errors import KvxferError, NotAvailable
from kvxfer.layout import TPLayout
from kvxfer.session import ReceiveLimits, Receiver, Sender

MODEL = KVLayout(2, 2, head_dim=8, block_size=4)
NUM_BLOCKS = 8
BLOCKS = [5, 2]


class Rank:
    """One rank's cache, filled with ``seed``."""

    def __init__(self, tp_size: int, tp_rank: int, seed: int) -> None:
        heads = MODEL.num_kv_heads // tp_size
        shape = (MODEL.num_layers, 2, NUM_BLOCKS, MODEL.block_size, heads, 16)
        memory = private_array(int(np.prod(shape)))
        memory[:] = np.random.default_rng(seed).integers(0, 256, memory.size, dtype=np.uint8)
        self.elements = memory.reshape(shape)
        self.cache = KVCache(MODEL, memory, rank=TPLayout(tp_size, tp_rank))

    def blocks(self, ids: Any) -> Any:
        return self.elements[:, :, list(ids)]


class Sides:
    """All ranks of both sides, in this process."""

    def __init__(self, num_senders: int, num_receivers: int, **limits: Any) -> None:
        self.stack = ExitStack()
        self.limits = ReceiveLimits(drain_s=30.0, **limits)
        self.sources = [Rank(num_senders, rank, 10 + rank) for rank in range(num_senders)]
        self.sinks = [Rank(num_receivers, rank, 20 + rank) for rank in range(num_receivers)]
        for one in (*self.sources, *self.sinks):
            self.stack.callback(one.cache.close)
        self.receivers = [self._receiver(one) for one in self.sinks]
        self.senders = [
            self.stack.enter_context(Sender(one.cache, transport="loopback"))
            for one in self.sources
        ]
        self.to = [receiver.addresses for receiver in self.receivers]

    def _receiver(self, rank: Rank) -> Receiver:
        made = Receiver(rank.cache, transport="loopback", limits=self.limits)
        return self.stack.enter_context(made)


@pytest.fixture
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    made = Sides(*request.param)
    with made.stack:
        yield made


def of(num_senders: int, num_receivers: int) -> Any:
    return pytest.mark.parametrize("sides", [(num_senders, num_receivers)], indirect=True)


@of(2, 1)
def test_a_request_is_here_once_all_its_ranks_have_committed(sides: Sides) -> None:
    (receiver,), (sink,) = sides.receivers, sides.sinks
    first = sides.senders[0].send("r", BLOCKS, to=sides.to)
    first.wait(20.0)
    assert receiver.poll(0.1) is None
    sides.senders[1].send("r", BLOCKS, to=sides.to).wait(20.0)
    notice = receiver.poll(20.0)
    assert notice is not None
    assert notice.ok
    assert receiver.poll(0.1) is None
    for head, source in enumerate(sides.sources):
        found = sink.blocks(notice.block_ids)[..., head, :]
        assert np.array_equal(found, source.blocks(BLOCKS)[..., 0, :])


@of(1, 2)
def test_each_rank_of_a_receiver_is_told(sides: Sides) -> None:
    sides.senders[0].send("r", BLOCKS, to=sides.to).wait(20.0)
    for head, (receiver, sink) in enumerate(zip(sides.receivers, sides.sinks, strict=True)):
        notice = receiver.poll(20.0)
        assert notice is not None
        assert notice.ok
        found = sink.blocks(notice.block_ids)[..., 0, :]
        assert np.array_equal(found, sides.sources[0].blocks(BLOCKS)[..., head, :])


@of(2, 2)
def test_ranks_without_a_share_are_left_alone(sides: Sides) -> None:
    for sender in sides.senders:
        sender.send("r", BLOCKS, to=sides.to).wait(20.0)
    for receiver in sides.receivers:
        notice = receiver.poll(20.0)
        assert notice is not None
        assert notice.ok
        assert receiver.poll(0.05) is None


def num_writers(receiver: Receiver) -> int:
    """Ranks that have reserved for the requests that are open."""
    open_requests = list(receiver._book._open.values())
    return sum(len(reception.writers) for reception in open_requests)


def is_told_to_wait(sender: Sender, request_id: str) -> bool:
    """Whether a receiver has had it ask again later, which it does soon."""
    return any(
        one.request_id == request_id and one._again_s < float("inf") for one in sender._deliveries
    )


def wait_until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@of(2, 1)
def test_a_failure_of_one_rank_ends_the_other_too(sides: Sides) -> None:
    (receiver,) = sides.receivers
    slow = sides.senders[1].send_layers("r", BLOCKS, to=sides.to)
    slow.layer(0)
    failing = sides.senders[0].send_layers("r", BLOCKS, to=sides.to)
    failing.layer(0)
    wait_until(lambda: num_writers(receiver) == 2)
    failing.cancel()
    with pytest.raises(KvxferError, match="cancelled"):
        failing.wait(20.0)
    # The other is told, though it waits for a layer, and lets go before the notice.
    with pytest.raises(KvxferError, match="its sender aborted"):
        slow.wait(20.0)
    notice = receiver.poll(20.0)
    assert notice is not None
    assert not notice.ok
    assert receiver.num_free_blocks == NUM_BLOCKS
    assert receiver.poll(0.05) is None


def test_a_rank_that_gave_up_before_it_was_heard_ends_the_request_for_the_others() -> None:
    sides = Sides(2, 1, num_requests=1)
    with sides.stack:
        (receiver,) = sides.receivers
        first = sides.senders[0].begin("first", to=sides.to, tokens=range(4))
        wait_until(lambda: num_writers(receiver) == 1)
        early = sides.senders[0].begin("r", to=sides.to, tokens=range(8))
        wait_until(lambda: is_told_to_wait(sides.senders[0], "r"))  # there is room for one
        early.cancel()
        with pytest.raises(KvxferError, match="cancelled"):
            early.wait(20.0)
        first.cancel()
        assert receiver.poll(20.0) is not None
        late = sides.senders[1].send("r", BLOCKS, to=sides.to)
        with pytest.raises(NotAvailable, match="'r' has failed: its sender aborted"):
            late.wait(20.0)
        assert (receiver.num_open, receiver.num_free_blocks) == (0, NUM_BLOCKS)


@of(1, 2)
def test_a_rank_that_refuses_fails_the_request_everywhere(sides: Sides) -> None:
    sides.senders[0].send("taken", BLOCKS, to=sides.to[:1]).wait(20.0)
    assert sides.receivers[0].poll(20.0)
    handle = sides.senders[0].send_layers("taken", BLOCKS, to=sides.to)
    handle.layer(0)
    with pytest.raises(NotAvailable, match="'taken' is committed already"):
        handle.wait(20.0)
    # It may not even have asked the other; if it has, that one was told.
    notice = sides.receivers[1].poll(0.0)
    assert notice is None or not notice.ok
    assert sides.receivers[1].num_free_blocks == NUM_BLOCKS
    assert sides.receivers[0].num_free_blocks == NUM_BLOCKS - 2
