"""The source is read after the stream that wrote it: raced with kernels that take their time."""

import threading
from typing import Any

import pytest
from cache_content import GUARD_BYTES
from cuda_driver import synchronize
from gpu_needs import array_library
from gpu_pairs import DeviceChild, GpuPair, linked_devices
from peer_process import DEADLINE_S
from stream_race import ALL_BLOCKS, CACHE, SLEEP_CYCLES, put_after, race


@pytest.fixture(scope="module")
def torch() -> Any:
    return array_library("torch")


def test_a_put_waits_for_the_stream_that_writes_its_source(torch: Any, child: DeviceChild) -> None:
    with linked_devices(child, CACHE, memory="cuda", local_memory="torch") as pair:
        race(torch, pair, torch.cuda.Stream(), num_rounds=20)


def test_the_default_stream_can_be_waited_for(torch: Any, child: DeviceChild) -> None:
    stream = torch.cuda.default_stream()
    assert stream.cuda_stream == 0
    with linked_devices(child, CACHE, memory="cuda", local_memory="torch") as pair:
        race(torch, pair, stream, num_rounds=5)


def test_the_race_fails_without_the_order(torch: Any, child: DeviceChild) -> None:
    def put_unordered(pair: GpuPair, _: int) -> Any:
        return pair.peer.put(ALL_BLOCKS, ALL_BLOCKS)

    with linked_devices(child, CACHE, memory="cuda", local_memory="torch") as pair:
        with pytest.raises(AssertionError, match=r"round \d+: \d+ pages are of an earlier round"):
            race(torch, pair, torch.cuda.Stream(), num_rounds=5, post=put_unordered)
        synchronize(0)


def test_the_race_fails_where_another_stream_is_waited_for(torch: Any, child: DeviceChild) -> None:
    other = torch.cuda.Stream()

    def put_after_other(pair: GpuPair, _: int) -> Any:
        return put_after(pair, other.cuda_stream)

    with linked_devices(child, CACHE, memory="cuda", local_memory="torch") as pair:
        with pytest.raises(AssertionError, match=r"round \d+: \d+ pages are of an earlier round"):
            race(torch, pair, torch.cuda.Stream(), num_rounds=5, post=put_after_other)
        synchronize(0)


def test_the_order_holds_from_threads_that_never_met_cuda(torch: Any, child: DeviceChild) -> None:
    outcomes: list[bool] = []

    def put_in_a_thread(pair: GpuPair, stream: int) -> None:
        def work() -> None:
            transfer = put_after(pair, stream)
            while not transfer.poll(0.0):
                pass
            outcomes.append(transfer.poll(0.0))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(DEADLINE_S)

    with linked_devices(child, CACHE, memory="cuda", local_memory="torch") as pair:
        race(torch, pair, torch.cuda.Stream(), num_rounds=10, post=put_in_a_thread)
    assert outcomes == [True] * 10


def test_a_get_lands_behind_what_still_uses_its_destination(torch: Any, child: DeviceChild) -> None:
    stream = torch.cuda.Stream()
    with linked_devices(child, CACHE, memory="cuda", local_memory="torch") as pair:
        pages = pair.local.memory[0].owner[GUARD_BYTES : GUARD_BYTES + CACHE.array_bytes]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            pages.zero_()
        pair.get(ALL_BLOCKS, ALL_BLOCKS, after=stream.cuda_stream)
        synchronize(0)
        pair.check()


def test_a_get_that_waits_for_nothing_is_overwritten(torch: Any, child: DeviceChild) -> None:
    stream = torch.cuda.Stream()
    with linked_devices(child, CACHE, memory="cuda", local_memory="torch") as pair:
        pages = pair.local.memory[0].owner[GUARD_BYTES : GUARD_BYTES + CACHE.array_bytes]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            pages.zero_()
        pair.get(ALL_BLOCKS, ALL_BLOCKS)
        synchronize(0)
        with pytest.raises(AssertionError, match="plane 0, block 0"):
            pair.check()
