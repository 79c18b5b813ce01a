"""A completed transfer is a visible one: another process waits, and reads the moment it is told.

The planted faults of the kernels show that this rule is what the tests look at: with a block that
is late the reader must not be told early, and where it is told early the race must fail.
"""

from collections.abc import Callable

import pytest
from cache_content import CacheShape, shape
from cuda_driver import synchronize
from gpu_pairs import DeviceChild, GpuPair, linked_devices
from peer_process import DEADLINE_S

from kvxfer import _core
from kvxfer.transport import Tuning

ALL_BLOCKS = list(range(16))
TINY = shape()  # 64 pages of 128 bytes
MIDDLE = shape(num_layers=4, block_size=128)  # 128 pages of 4 KiB
LARGE = shape(num_layers=4, block_size=2048)  # 128 pages of 64 KiB
KERNELS = [_core.CopyEngine.BULK, _core.CopyEngine.LOAD_STORE]

Post = Callable[[GpuPair, list[int]], None]


def put_all(pair: GpuPair, dst: list[int]) -> None:
    pair.peer.put(ALL_BLOCKS, dst)


def race(pair: GpuPair, *, num_rounds: int, post: Post = put_all) -> None:
    """Send a new pattern each round to a reader that spins on the flag; fail on a stale page."""
    incarnation = pair.local.endpoint.incarnation
    for round_number in range(1, num_rounds + 1):
        pair.local.stamp(round_number, ALL_BLOCKS)
        dst = ALL_BLOCKS[round_number % 16 :] + ALL_BLOCKS[: round_number % 16]
        result = pair.remote.start(
            "expect",
            incarnation=incarnation,
            sequence=round_number,
            round_number=round_number,
            src_block_ids=ALL_BLOCKS,
            dst_block_ids=dst,
            timeout_s=DEADLINE_S,
        )
        post(pair, dst)
        outcome = result()
        assert outcome["signalled"], f"round {round_number} was never signalled"
        num_stale = outcome["num_stale"]
        assert num_stale == 0, f"round {round_number}: {num_stale} stale pages behind the flag"


@pytest.mark.parametrize(
    ("cache", "num_rounds"), [(TINY, 640), (MIDDLE, 300), (LARGE, 60)], ids=["8k", "512k", "8m"]
)
def test_what_is_signalled_is_visible(
    child: DeviceChild, cache: CacheShape, num_rounds: int
) -> None:
    with linked_devices(child, cache) as pair:
        race(pair, num_rounds=num_rounds)


@pytest.mark.parametrize("num_sms", [1, 0, 32])
@pytest.mark.parametrize("cache", [TINY, MIDDLE], ids=["8k", "512k"])
@pytest.mark.parametrize("engine", ["bulk", "load_store", "dma"])
def test_what_each_engine_signals_is_visible(
    child: DeviceChild, engine: str, cache: CacheShape, num_sms: int
) -> None:
    def post(pair: GpuPair, dst: list[int]) -> None:
        pair.peer.put(ALL_BLOCKS, dst, tuning=Tuning(engine, num_sms))

    with linked_devices(child, cache) as pair:
        race(pair, num_rounds=20, post=post)


def faulty(fault: _core.CopyFault, engine: _core.CopyEngine) -> Post:
    def post(pair: GpuPair, dst: list[int]) -> None:
        pair.post_faulty(ALL_BLOCKS, dst, fault, engine)

    return post


@pytest.mark.parametrize("engine", KERNELS, ids=lambda engine: engine.name)
def test_nothing_is_signalled_before_the_slowest_block(
    child: DeviceChild, engine: _core.CopyEngine
) -> None:
    with linked_devices(child, MIDDLE) as pair:
        race(pair, num_rounds=10, post=faulty(_core.CopyFault.DELAY_BLOCK_0, engine))


@pytest.mark.parametrize("engine", KERNELS, ids=lambda engine: engine.name)
def test_the_race_fails_where_the_first_block_signals_for_all(
    child: DeviceChild, engine: _core.CopyEngine
) -> None:
    with linked_devices(child, MIDDLE) as pair:
        with pytest.raises(AssertionError, match=r"round \d+: \d+ stale pages behind the flag"):
            race(pair, num_rounds=10, post=faulty(_core.CopyFault.SIGNAL_EARLY, engine))
        synchronize(0)


def test_the_race_fails_on_a_page_that_is_left_out(child: DeviceChild) -> None:
    def all_but_the_last(pair: GpuPair, dst: list[int]) -> None:
        pair.peer.put(ALL_BLOCKS[:-1], dst[:-1])

    with (
        linked_devices(child, TINY) as pair,
        pytest.raises(AssertionError, match="round 1: 4 stale pages"),
    ):
        race(pair, num_rounds=1, post=all_but_the_last)


def test_every_transfer_is_signalled_once_whatever_its_size(child: DeviceChild) -> None:
    with linked_devices(child, TINY) as pair:
        assert not pair.signalled(1)
        for sequence, ids in enumerate(([], [0], [], [], [1, 2], []), start=1):
            transfer = pair.peer.put(ids, ids)
            transfer.wait(DEADLINE_S)
            assert transfer.num_bytes == len(ids) * 4 * 128
            assert pair.signalled(sequence)
            assert not pair.signalled(sequence + 1)
        pair.peer.get([0], [0]).wait(DEADLINE_S)
        assert pair.signalled(7)
        assert pair.signalled(1)  # what is done stays done
        assert not pair.signalled(8, timeout_s=0.3)


def test_an_empty_transfer_stays_behind_those_before_it(child: DeviceChild) -> None:
    with linked_devices(child, MIDDLE) as pair:
        pair.post_faulty(ALL_BLOCKS, ALL_BLOCKS, _core.CopyFault.DELAY_BLOCK_0)
        pair.peer.put([], []).wait(DEADLINE_S)
        pair.remote.call("copied_in", src_seed=1, src_ids=ALL_BLOCKS, dst_ids=ALL_BLOCKS)
        pair.check()


def test_a_poll_says_no_until_the_bytes_are_there(child: DeviceChild) -> None:
    with linked_devices(child, MIDDLE) as pair:
        pair.post_faulty(ALL_BLOCKS, ALL_BLOCKS, _core.CopyFault.DELAY_BLOCK_0)
        transfer = pair.peer.put([0], [1])
        num_no = 0
        while not transfer.poll(0.0):
            num_no += 1
        assert num_no > 0
        assert transfer.poll(0.0)
        pair.remote.call("copied_in", src_seed=1, src_ids=ALL_BLOCKS, dst_ids=ALL_BLOCKS)
        pair.remote.call("copied_in", src_seed=1, src_ids=[0], dst_ids=[1])
        pair.check()


def test_a_reconnected_peer_counts_on(child: DeviceChild) -> None:
    with linked_devices(child, TINY) as pair:
        pair.peer.put([0], [0]).wait(DEADLINE_S)
        pair.peer.close()
        with pair.local.endpoint.connect(pair.opened["addresses"]) as again:
            assert pair.signalled(1)
            assert not pair.signalled(2)
            again.put([1], [1]).wait(DEADLINE_S)
            assert pair.signalled(2)
