"""Marks in a stream: a copy waits for what was queued before the mark, and for nothing else."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda_driver import synchronize
from gpu_needs import array_library
from gpu_pairs import DeviceChild, GpuPair, linked_devices
from stream_race import ALL_BLOCKS, CACHE, SLEEP_CYCLES, race

from kvxfer import KVCache, KVLayout
from kvxfer.errors import CudaError
from kvxfer.session import Receiver, Sender, SendHandle
from kvxfer.transport import StreamMark

NUM_BLOCKS, BLOCKS = 16, [3, 1, 7]
LAYOUT = KVLayout(4, 2, head_dim=64, block_size=16)


@pytest.fixture(scope="module")
def torch() -> Any:
    return array_library("torch")


def spoil_slowly(torch: Any, pair: GpuPair, stream: int) -> None:
    """Queue on ``stream``: nothing for a while, then zeros over all pages."""
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        torch.cuda._sleep(SLEEP_CYCLES)
        pair.local.memory[0].owner.zero_()


def test_a_put_waits_for_the_mark_and_not_for_what_is_behind_it(
    torch: Any, child: DeviceChild
) -> None:
    def put_after_mark(pair: GpuPair, stream: int) -> Any:
        mark = StreamMark(0, stream)
        transfer = pair.peer.put(ALL_BLOCKS, ALL_BLOCKS, after=mark)
        del mark  # what is posted stays in order
        spoil_slowly(torch, pair, stream)
        transfer.wait()
        return transfer

    with linked_devices(child, CACHE, memory="cuda", local_memory="torch") as pair:
        race(torch, pair, torch.cuda.Stream(), num_rounds=10, post=put_after_mark)


def test_a_mark_serves_another_thread_later(torch: Any, child: DeviceChild) -> None:
    def put_in_a_thread(pair: GpuPair, stream: int) -> Any:
        mark = StreamMark(0, stream)
        spoil_slowly(torch, pair, stream)

        def work() -> None:
            for blocks in (ALL_BLOCKS[:5], ALL_BLOCKS[5:]):  # one mark, two copies
                pair.peer.put(blocks, blocks, after=mark)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(20.0)

    with linked_devices(child, CACHE, memory="cuda", local_memory="torch") as pair:
        stream = torch.cuda.Stream()
        race(torch, pair, stream, num_rounds=10, post=put_in_a_thread, num_puts=2)


def test_a_put_behind_the_whole_stream_sees_what_came_after_the_mark(
    torch: Any, child: DeviceChild
) -> None:
    def put_after_stream(pair: GpuPair, stream: int) -> Any:
        spoil_slowly(torch, pair, stream)
        return pair.peer.put(ALL_BLOCKS, ALL_BLOCKS, after=stream)

    with linked_devices(child, CACHE, memory="cuda", local_memory="torch") as pair:
        with pytest.raises(AssertionError, match=r"round \d+: \d+ pages are of an earlier round"):
            race(torch, pair, torch.cuda.Stream(), num_rounds=3, post=put_after_stream)
        synchronize(0)


def test_a_mark_leaves_the_current_device_alone(torch: Any) -> None:
    current = torch.cuda.current_device()
    mark = StreamMark(0, torch.cuda.Stream(0).cuda_stream)
    assert (mark.device, torch.cuda.current_device()) == (0, current)
    del mark
    assert torch.cuda.current_device() == current


def test_a_device_that_is_not_there_has_no_marks() -> None:
    with pytest.raises(CudaError):
        StreamMark(1 << 12, 0)


class Session:
    """A sender and a receiver of one GPU in this process."""

    def __init__(self, torch: Any) -> None:
        num_bytes = NUM_BLOCKS * LAYOUT.block_bytes
        self.src = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0")
        self.dst = torch.full((num_bytes,), 255, dtype=torch.uint8, device="cuda:0")
        self.caches = [KVCache(LAYOUT, one) for one in (self.src, self.dst)]
        self.receiver = Receiver(self.caches[1], transport="loopback")
        self.sender = Sender(self.caches[0], transport="loopback")

    def pages(self, memory: Any) -> Any:
        return memory.view(LAYOUT.num_layers, 2, NUM_BLOCKS, LAYOUT.page_bytes)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        for cache in self.caches:
            cache.close()


@pytest.fixture
def session(torch: Any) -> Iterator[Session]:
    made = Session(torch)
    try:
        yield made
    finally:
        made.close()


def push_layers(
    torch: Any, session: Session, handle: SendHandle, tokens: range, *, ordered: bool
) -> None:
    """Queue slow work that fills the blocks of ``tokens`` layer by layer; push each at once."""
    stream = torch.cuda.Stream(0)
    for layer in range(LAYOUT.num_layers):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            for block in BLOCKS[tokens.start // 16 : -(-tokens.stop // 16)]:
                session.pages(session.src)[layer, :, block].fill_(layer + 1)
        after = stream.cuda_stream if ordered else None
        handle.push(BLOCKS, tokens=tokens, layers=[layer], after=after)


def begin_granted(session: Session) -> SendHandle:
    """A request of all tokens of `BLOCKS`, whose parts go as soon as they are pushed."""
    handle = session.sender.begin("r", to=session.receiver.addresses, tokens=range(48))
    end_s = time.monotonic() + 20.0
    while session.receiver.num_free_blocks == NUM_BLOCKS:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    return handle


def check_received(session: Session) -> None:
    notice = session.receiver.poll(20.0)
    assert notice is not None
    assert notice.ok
    pages = session.pages(session.dst).cpu().numpy()
    found = pages[:, :, list(notice.block_ids)]
    expected = np.arange(1, LAYOUT.num_layers + 1, dtype=np.uint8)
    assert (found == expected[:, None, None, None]).all(), "old pages arrived"


def test_parts_are_read_behind_the_work_that_fills_them(torch: Any, session: Session) -> None:
    handle = begin_granted(session)
    for tokens in (range(32), range(32, 48)):
        push_layers(torch, session, handle, tokens, ordered=True)
    handle.finish()
    handle.wait(20.0)
    check_received(session)


def test_parts_without_an_order_are_read_too_soon(torch: Any, session: Session) -> None:
    handle = begin_granted(session)
    push_layers(torch, session, handle, range(48), ordered=False)
    handle.finish()
    handle.wait(20.0)
    with pytest.raises(AssertionError, match="old pages arrived"):
        check_received(session)
    synchronize(0)


def test_more_parts_than_copies_may_be_in_flight_all_arrive(torch: Any, session: Session) -> None:
    stream = torch.cuda.Stream(0)
    handle = begin_granted(session)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        for layer in range(LAYOUT.num_layers):
            session.pages(session.src)[layer].fill_(layer + 1)
    mark = StreamMark(0, stream.cuda_stream)
    for token in range(48):
        for layer in range(LAYOUT.num_layers):
            handle.push(BLOCKS, tokens=range(token, token + 1), layers=[layer], after=mark)
    handle.finish()
    handle.wait(20.0)
    check_received(session)
