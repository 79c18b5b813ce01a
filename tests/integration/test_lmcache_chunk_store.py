"""Stores of chunks that read from and write to each other; no LMCache in it."""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from free_ports import free_port
from waiting import GUARD_S, eventually

from kvxfer.connectors.lmcache.chunk_store import Bytes, ChunkStore
from kvxfer.connectors.lmcache.lane import Lane
from kvxfer.connectors.lmcache.page_store import Form
from kvxfer.connectors.lmcache.store_port import Ask, FarStore, StorePort, Tell
from kvxfer.control import SharedKey
from kvxfer.errors import InvalidUsage, NotAvailable, ProtocolMismatch
from kvxfer.memory import shared_empty
from kvxfer.session import Peer

PAGE_BYTES, NUM_PAGES = 4096, 8
HOST = "127.0.0.1"
MakeStore = Callable[..., ChunkStore]


def free_address() -> str:
    return f"{HOST}:{free_port()}"


@pytest.fixture
def new_store() -> Iterator[MakeStore]:
    made: list[ChunkStore] = []

    def make(num_pages: int = NUM_PAGES, **more: object) -> ChunkStore:
        args = {"timeout_s": 5.0} | more
        made.append(ChunkStore(PAGE_BYTES, num_pages * PAGE_BYTES, **args))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for store in reversed(made):
        store.close()


def chunk(number: int, num_bytes: int = PAGE_BYTES) -> tuple[str, Form, Bytes]:
    data = (np.arange(num_bytes) * 7 + number).astype(np.uint8)
    return f"chunk-{number}", Form(num_bytes, [num_bytes], "uint8", 4), data


def content(store: ChunkStore, name: str) -> Bytes | None:
    with store.reading(name) as found:
        return None if found is None else found[1].copy()


def test_what_was_put_is_read_back(new_store: MakeStore) -> None:
    store = new_store()
    name, form, data = chunk(1, 100)
    assert store.put(name, form, data)
    assert not store.put(name, form, data)
    assert name in store
    np.testing.assert_array_equal(content(store, name), data)
    assert content(store, "another") is None
    with pytest.raises(InvalidUsage, match="a page of this store has 4096"):
        store.put("large", Form(PAGE_BYTES + 1, [], "uint8", 4), data)


def test_a_chunk_of_a_peer_is_read_over(new_store: MakeStore) -> None:
    at = free_address()
    far = new_store(listen=at)
    near = new_store(peers=[at])
    for number in range(NUM_PAGES):
        far.put(*chunk(number))
    for number in range(NUM_PAGES):
        name, _, data = chunk(number)
        assert near.is_anywhere(name)
        assert name not in near
        assert near.is_near(name)
        np.testing.assert_array_equal(content(near, name), data)
    assert not near.is_near("another")
    # Nothing stays held over there: all of it can give way.
    for number in range(100, 100 + NUM_PAGES):
        assert far.put(*chunk(number))


def test_chunks_of_a_peer_are_read_at_once(new_store: MakeStore) -> None:
    at = free_address()
    far = new_store(listen=at)
    near = new_store(num_pages=2, peers=[at])
    for number in range(3):
        far.put(*chunk(number))
    assert near.pin_all(["chunk-0", "another", "chunk-2"]) == (set(), {"chunk-0", "chunk-2"})
    for number in (0, 2):
        name, _, data = chunk(number)
        np.testing.assert_array_equal(content(near, name), data)
    assert near.unpin("chunk-0")
    # One page is left, and of what is here none gives way.
    assert near.pin_all(["chunk-1", "chunk-2"]) == ({"chunk-2"}, {"chunk-1"})
    assert "chunk-0" not in near
    assert [near.unpin("chunk-2") for _ in range(3)] == [True, True, False]
    for number in range(100, 100 + NUM_PAGES):
        assert far.put(*chunk(number))  # nothing stays held over there


def test_what_one_peer_had_does_not_give_way_to_what_another_has(new_store: MakeStore) -> None:
    addresses = [free_address(), free_address()]
    for number, at in enumerate(addresses):
        new_store(listen=at).put(*chunk(number))
    near = new_store(num_pages=1, peers=addresses)
    assert near.pin_all(["chunk-0", "chunk-1"]) == (set(), {"chunk-0"})


def test_a_copy_is_written_to_a_peer(new_store: MakeStore) -> None:
    at = free_address()
    far = new_store(listen=at)
    near = new_store(peers=[at], copies="peers")
    name, form, data = chunk(3, 1000)
    near.put(name, form, data)
    np.testing.assert_array_equal(content(far, name), data)


def test_a_chunk_is_given_to_a_peer_and_not_kept(new_store: MakeStore) -> None:
    at = free_address()
    dropped: list[str] = []
    far = new_store(num_pages=1, listen=at)
    near = new_store(num_pages=1, peers=[at], on_drop=dropped.append)
    name, form, data = chunk(3, 1000)
    assert near.give(name, form, data)
    assert near.give(name, form, data)  # it is there
    assert name not in near
    assert dropped == []  # it never was here
    np.testing.assert_array_equal(content(far, name), data)
    assert near.is_near(name)
    np.testing.assert_array_equal(content(near, name), data)
    with pytest.raises(InvalidUsage, match="a page of this store has 4096"):
        near.give("large", Form(PAGE_BYTES + 1, [], "uint8", 4), data)


def test_a_chunk_that_no_peer_takes_is_not_given(new_store: MakeStore) -> None:
    at = free_address()
    far = new_store(num_pages=1, listen=at)
    near = new_store(num_pages=1, peers=[at])
    far.put(*chunk(1))
    assert far.pin("chunk-1")
    assert not near.give(*chunk(2))
    far.close()
    assert not near.give(*chunk(2))
    assert near.put(*chunk(2))  # its page is free again
    assert near.pin("chunk-2")
    assert not near.give(*chunk(3))  # no page here for its way
    assert not new_store().give(*chunk(3))  # it has no peers


def test_a_peer_that_is_gone_is_no_error_and_one_that_returns_is_met(new_store: MakeStore) -> None:
    at = free_address()
    far = new_store(listen=at)
    near = new_store(peers=[at])
    far.put(*chunk(1))
    assert near.is_near("chunk-1")
    far.close()
    assert not near.is_anywhere("chunk-2")
    far = new_store(listen=at)
    far.put(*chunk(2))
    eventually(lambda: near.is_near("chunk-2"), "the peer that returned is not met", GUARD_S)


def test_a_peer_that_does_not_answer_is_left_alone_for_a_while(
    new_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    at = free_address()
    near = new_store(peers=[at], copies="moved", timeout_s=2.0)
    for number in range(4):
        assert not near.give(*chunk(number))
    assert caplog.text.count(f"no store answered at {at} within 2 s") == 1
    assert caplog.text.count("it is asked again in") == 3


def test_a_copy_that_fails_costs_no_page(new_store: MakeStore) -> None:
    store = new_store(num_pages=1)
    name, form, data = chunk(1)
    with pytest.raises(ValueError, match="broadcast"):
        store.put(name, form, data[:7])
    assert name not in store
    assert store.put(name, form, data)


def test_who_is_asked_again_after_a_lost_answer_holds_nothing_of_before(
    new_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = free_address()
    far = new_store(listen=at)
    near = new_store(peers=[at])
    far.put(*chunk(1))
    stock = StorePort._answer

    def deaf_to_the_end(self: StorePort, ask: Ask) -> Tell:
        if ask.kind == "end_read":
            raise ProtocolMismatch("planted")
        return stock(self, ask)

    with monkeypatch.context() as patch:
        patch.setattr(StorePort, "_answer", deaf_to_the_end)
        assert not near.is_near("chunk-1")
        assert not far.drop("chunk-1")  # it is still held
    eventually(lambda: near.is_near("chunk-1"), "the peer is not met anew", GUARD_S)
    eventually(lambda: far.drop("chunk-1"), "it is held by a connection of before", GUARD_S)


def test_an_answer_that_is_too_short_costs_no_page(
    new_store: MakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at = free_address()
    far = new_store(listen=at)
    near = new_store(num_pages=1, peers=[at])
    far.put(*chunk(1))
    with monkeypatch.context() as patch:
        stock = StorePort._answer

        def short(self: StorePort, ask: Ask) -> Tell:
            answer = stock(self, ask)
            return Tell() if ask.kind == "end_read" else answer

        patch.setattr(StorePort, "_answer", short)
        assert not near.is_near("chunk-1")
    assert "answers 1 keys with 0 pages" in caplog.text
    assert near.put(*chunk(2))


def test_pages_of_a_connection_that_ended_are_not_written(
    new_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where a store was started anew, they may be those of another chunk by then.
    at = free_address()
    far = new_store(listen=at)
    near = new_store(peers=[at], copies="peers")
    stock = FarStore._move

    def late(self: FarStore, peer: Peer, *rest: Any) -> None:
        self._lane.distrust(peer)
        self._lane.connect()
        stock(self, peer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(FarStore, "_move", late)
        near.put(*chunk(1))
    assert "chunk-1" not in far
    near.put(*chunk(2))
    assert "chunk-2" in far


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No copy ends before it is set."""
    made = threading.Event()
    stock = Lane._deliver

    def late(self: Lane, *job: Any) -> None:
        assert made.wait(GUARD_S)
        stock(self, *job)

    monkeypatch.setattr(Lane, "_deliver", late)
    yield made
    made.set()


def test_a_chunk_that_is_written_late_is_held_until_nothing_moves(
    new_store: MakeStore, over: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    at = free_address()
    far = new_store(listen=at)
    near = new_store(peers=[at], copies="peers", move_timeout_s=0.5)
    assert near.put(*chunk(1))
    assert "1 chunks were not moved to or from the store" in caplog.text
    assert not near.drop("chunk-1")  # it is still read
    assert not far.put(*chunk(1))  # and written
    near.put(*chunk(2))  # does not wait again
    assert "chunks of before still move" in caplog.text
    over.set()
    eventually(lambda: near.drop("chunk-1"), "a chunk stays held")

    numbers = itertools.count(3)

    def is_written() -> bool:
        name, *rest = chunk(next(numbers))
        near.put(name, *rest)
        return name in far

    eventually(is_written, "nothing is written any more")
    eventually(lambda: far.put(*chunk(1)), "a page stays reserved at the peer")


def test_a_page_that_is_filled_late_is_held_until_nothing_moves(
    new_store: MakeStore, over: threading.Event
) -> None:
    at = free_address()
    far = new_store(listen=at)
    near = new_store(num_pages=1, peers=[at], move_timeout_s=0.5)
    far.put(*chunk(1))
    assert not near.is_near("chunk-1")
    assert not near.put(*chunk(2))  # its page is still written
    over.set()
    eventually(lambda: near.put(*chunk(2)), "a page stays held")
    eventually(lambda: near.is_near("chunk-1"), "nothing is read any more")
    np.testing.assert_array_equal(content(near, "chunk-1"), chunk(1)[2])
    eventually(lambda: far.drop("chunk-1"), "a chunk stays held at the peer")


def test_stores_with_one_key_keep_others_out(new_store: MakeStore, tmp_path: Path) -> None:
    at, key_file = free_address(), str(tmp_path / "key")
    SharedKey.create(key_file)
    far = new_store(listen=at, key_file=key_file)
    far.put(*chunk(1))
    assert not new_store(peers=[at]).is_near("chunk-1")
    near = new_store(peers=[at], key_file=key_file)
    eventually(lambda: near.is_near("chunk-1"), "who holds the key is kept out")


def test_a_store_is_served_over_the_transport_that_is_named(new_store: MakeStore) -> None:
    with pytest.raises(InvalidUsage, match="transport 'carrier pigeon' is unknown"):
        new_store(transport="carrier pigeon")


def test_a_pinned_chunk_does_not_give_way(new_store: MakeStore) -> None:
    dropped: list[str] = []
    store = new_store(num_pages=2, on_drop=dropped.append)
    store.put(*chunk(0))
    store.put(*chunk(1))
    assert store.pin("chunk-0")
    assert store.put(*chunk(2))
    assert dropped == ["chunk-1"]
    assert store.pin("chunk-2")
    assert not store.put(*chunk(3))
    assert store.unpin("chunk-0")
    assert not store.unpin("chunk-0")
    assert store.put(*chunk(3))
    assert store.drop("chunk-3")
    assert not store.drop("chunk-3")


def test_a_taken_port_is_named(new_store: MakeStore) -> None:
    at = free_address()
    new_store(listen=at)
    with pytest.raises(NotAvailable, match=at.replace(".", r"\.")):
        new_store(listen=at)


@pytest.mark.parametrize("wrong", [{"transport": "none"}, {"listen": "192.0.2.7:7000"}])
def test_a_store_that_cannot_be_made_leaves_its_memory_free_for_others(
    new_store: MakeStore, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str]
) -> None:
    memory = shared_empty((NUM_PAGES, PAGE_BYTES))
    home = "kvxfer.connectors.lmcache.chunk_store.shared_empty"
    monkeypatch.setattr(home, lambda shape: memory[: shape[0]])
    with pytest.raises((InvalidUsage, NotAvailable)):
        new_store(**wrong)
    assert new_store(NUM_PAGES // 2).put(*chunk(1))
