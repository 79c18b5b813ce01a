"""A completed transfer is a visible one: the far side waits, and reads the moment it is told."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from cache_content import shape
from peer_process import DEADLINE_S
from transport_pairs import LOOPBACK, ON_ONE_HOST, SHM_SHARED, LinkPair, Pair

from kvxfer.session.meeting import leave
from kvxfer.transport import Tuning

NUM_ROUNDS = 300
# 8 planes x 16 blocks x 4 KiB: long enough for a reader that is told too early to see old bytes.
RACED = shape(num_layers=4, block_size=128, num_blocks=16)
ALL_BLOCKS = list(range(16))


def race(pair: Pair, *, num_rounds: int, engine: str = "auto") -> None:
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
        pair.peer.put(ALL_BLOCKS, dst, tuning=Tuning(engine=engine))
        outcome = result()
        assert outcome["signalled"], f"round {round_number} was never signalled"
        num_stale = outcome["num_stale"]
        assert num_stale == 0, f"round {round_number}: {num_stale} stale pages behind the flag"


def test_what_is_signalled_is_visible(link_pair: LinkPair) -> None:
    with link_pair(RACED) as pair:
        race(pair, num_rounds=NUM_ROUNDS)


@pytest.mark.parametrize("kind", [LOOPBACK, SHM_SHARED], indirect=True, ids=str)
def test_what_is_signalled_after_streaming_stores_is_visible(link_pair: LinkPair) -> None:
    with link_pair(RACED) as pair:
        race(pair, num_rounds=NUM_ROUNDS, engine="streaming")


def plant(pair: Pair, monkeypatch: pytest.MonkeyPatch, before: Callable[[], None]) -> None:
    """Have ``before`` run in each post of this side's link, ahead of the copy."""
    link: Any = pair.peer.link
    copy = link._copy

    def spoiled(*args: Any) -> Any:
        before()
        return copy(*args)

    monkeypatch.setattr(link, "_copy", spoiled)


@pytest.mark.parametrize("kind", ON_ONE_HOST, indirect=True, ids=str)
def test_the_race_fails_on_a_signal_ahead_of_its_data(
    link_pair: LinkPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with link_pair(RACED) as pair:
        slot = pair.peer.link._slot  # type: ignore[attr-defined]
        start, results = pair.remote.start, []

        def started(name: str, **args: Any) -> Callable[[], Any]:
            results.append(functools.cache(start(name, **args)))
            return results[-1]

        def signal_early() -> None:
            slot.signal(slot._sequence + 1)
            results[-1]()  # by then it has read

        monkeypatch.setattr(pair.remote, "start", started)

        plant(pair, monkeypatch, signal_early)
        with pytest.raises(AssertionError, match=r"round 1: \d+ stale pages behind the flag"):
            race(pair, num_rounds=1)


def test_the_race_fails_on_a_page_that_is_left_out(
    link_pair: LinkPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with link_pair(RACED) as pair:
        put = pair.peer.put

        def all_but_the_last(src: list[int], dst: list[int], **options: Any) -> Any:
            return put(src[:-1], dst[:-1], **options)

        monkeypatch.setattr(pair.peer, "put", all_but_the_last)
        with pytest.raises(AssertionError, match="round 1: 8 stale pages"):
            race(pair, num_rounds=1)


def waits(pair: Pair, sequence: int, timeout_s: float = 0.0, connection: str = "") -> bool:
    told: bool = pair.remote.call(
        "wait",
        incarnation=connection or pair.local.endpoint.incarnation,
        sequence=sequence,
        timeout_s=timeout_s,
    )
    return told


def test_every_transfer_is_signalled_once_whatever_its_size(pair: Pair) -> None:
    assert not waits(pair, 1)
    for sequence, ids in enumerate(([0], [], [1, 2], [], [], [3]), start=1):
        pair.peer.put(ids, ids)
        assert waits(pair, sequence)
        assert not waits(pair, sequence + 1)
    pair.peer.get([0], [0])
    assert waits(pair, 7)
    assert waits(pair, 1)  # what is done stays done


def test_a_wait_ends_at_its_deadline(pair: Pair) -> None:
    assert not waits(pair, 1, timeout_s=0.3)
    assert not waits(pair, 1, timeout_s=-1.0)


def test_a_wait_without_end_ends_with_the_transfer(pair: Pair) -> None:
    told: list[bool] = []
    waiter = threading.Thread(
        target=lambda: told.append(waits(pair, 1, timeout_s=3600.0)), daemon=True
    )
    waiter.start()
    waiter.join(0.3)
    assert waiter.is_alive()
    pair.peer.put([0], [0])
    waiter.join(DEADLINE_S)
    assert told == [True]


@pytest.mark.usefixtures("heard_leaves")
def test_a_reconnected_peer_counts_on(pair: Pair) -> None:
    pair.peer.put([0], [0])
    pair.peer.close()
    with pair.local.endpoint.connect(pair.remote_opened["addresses"]) as again:
        assert waits(pair, 1)
        assert not waits(pair, 2)
        again.put([1], [1])
        assert waits(pair, 2)


@pytest.mark.usefixtures("heard_leaves")
def test_a_peer_that_did_not_hear_of_the_end_may_hear_of_it_later(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = pair.remote_opened["addresses"]
    with monkeypatch.context() as patch:
        patch.setattr("kvxfer.session.peer.leave", lambda *_: False)
        pair.peer.close()
    with pair.local.endpoint.connect(addresses) as second:
        assert second.connection != pair.peer.connection
        # It comes now.
        assert leave(addresses["alloc"], pair.peer.connection, None)
        assert second.put([0], [0]).sequence == 1
        assert waits(pair, 1, connection=second.connection)


def test_a_transfer_says_its_number(pair: Pair) -> None:
    for number in range(1, 4):
        assert pair.peer.put([0], [1]).sequence == number
        assert waits(pair, number, connection=pair.peer.connection)
    assert pair.peer.get([0], [1]).sequence == 4


@pytest.mark.usefixtures("heard_leaves")
def test_each_of_two_connections_counts_for_itself(pair: Pair) -> None:
    incarnation = pair.local.endpoint.incarnation
    assert pair.peer.connection == incarnation
    with pair.local.endpoint.connect(pair.remote_opened["addresses"]) as second:
        assert second.connection == f"{incarnation}#2"
        second.put([0], [0])
        second.put([1], [1])
        # What one has completed says nothing about the other.
        assert not waits(pair, 1, connection=pair.peer.connection)
        assert waits(pair, 2, connection=second.connection)
        assert pair.peer.put([2], [2]).sequence == 1
        assert waits(pair, 1, connection=pair.peer.connection)
        assert not waits(pair, 2, connection=pair.peer.connection)
        with pair.local.endpoint.connect(pair.remote_opened["addresses"]) as third:
            assert third.connection == f"{incarnation}#3"
            assert not waits(pair, 1, connection=third.connection)
        pair.peer.close()
        with pair.local.endpoint.connect(pair.remote_opened["addresses"]) as again:
            assert again.connection == incarnation
            assert again.put([3], [3]).sequence == 2
            assert waits(pair, 2, connection=incarnation)
            assert not waits(pair, 3, connection=second.connection)


@pytest.mark.usefixtures("heard_leaves")
def test_one_endpoint_at_two_spellings_of_its_address_is_one(pair: Pair) -> None:
    addresses = {
        channel: url.replace("127.0.0.1", "localhost")
        for channel, url in pair.remote_opened["addresses"].items()
    }
    with pair.local.endpoint.connect(addresses) as second:
        assert second.connection == f"{pair.local.endpoint.incarnation}#2"
        second.put([0], [0])
        assert not waits(pair, 1)


@pytest.mark.usefixtures("heard_leaves")
def test_a_forgotten_peer_keeps_its_name_for_as_long_as_its_link(pair: Pair) -> None:
    # As a transfer in flight keeps it, which signals when its peer is long forgotten.
    addresses, connect = pair.remote_opened["addresses"], pair.local.endpoint.connect
    forgotten = connect(addresses)
    name, link = forgotten.connection, forgotten.link
    del forgotten
    with connect(addresses) as other:
        assert other.connection != name
    assert link.path
    del link
    with connect(addresses) as other:
        assert other.connection == name


def test_transfers_of_several_threads_are_all_signalled(pair: Pair) -> None:
    num_threads, num_puts = 4, 25

    def work(first: int) -> None:
        for turn in range(num_puts):
            pair.peer.put([(first + turn) % 16], [first])

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert waits(pair, num_threads * num_puts)
    assert not waits(pair, num_threads * num_puts + 1)
    cache = pair.remote.shape
    last = [(n + num_puts - 1) % 16 for n in range(num_threads)]
    expected = cache.copied(cache.content(1), cache.content(2), last, list(range(num_threads)))
    pair.check_both(remote=expected)
