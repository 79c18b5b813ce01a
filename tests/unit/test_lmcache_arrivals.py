"""Grants of an LMCache pool: a key is a hit when its bytes are there, and every page comes back."""

import threading
import time
from typing import Any

import pytest
from lmcache_grants import LEASE_S, PLANTED, UNREADABLE, Setup

from kvxfer.connectors.lmcache import arrivals
from kvxfer.control import DeferredReply
from kvxfer.errors import InvalidUsage

GUARD_S = 60.0


def test_a_key_is_a_hit_once_its_grant_is_committed() -> None:
    setup = Setup()
    answer = setup.granted("a", "r", "xyz")
    assert answer.remote_indexes == [0, 1, 2]
    assert setup.shelf.hits == {}
    setup.commit("a", answer)
    assert set(setup.shelf.hits) == set("xyz")


def test_a_grant_committed_on_its_way_is_a_hit_once_its_transfer_has_ended() -> None:
    setup = Setup()
    first, second = setup.granted("a", "1", "xy"), setup.granted("a", "2", "z")
    setup.commit("a", first, sequence=5)
    setup.commit("a", second, sequence=6)
    setup.writers.reached["b"] = 9  # another connection's
    setup.arrivals.publish_arrived()
    assert setup.shelf.hits == {}
    assert setup.shelf.num_free() == 5
    setup.writers.reached["a"] = 5
    setup.arrivals.publish_arrived()
    assert set(setup.shelf.hits) == set("xy")
    setup.writers.reached["a"] = 6
    setup.arrivals.serve_waiting()
    assert set(setup.shelf.hits) == set("xyz")


def test_a_grant_committed_on_its_way_that_fails_is_no_hit_whatever_comes_later() -> None:
    setup = Setup()
    answer = setup.granted("a", "r", "xy")
    setup.commit("a", answer, sequence=5)
    setup.abort("a", answer)
    setup.writers.reached["a"] = 6
    setup.arrivals.publish_arrived()
    assert setup.shelf.hits == {}
    assert setup.shelf.num_free() == 8


def test_pages_on_their_way_of_a_cancelled_request_come_back_once_they_have_arrived() -> None:
    setup = Setup()
    answer = setup.granted("a", "r", "xy")
    setup.commit("a", answer, sequence=1)
    setup.cancel("a", "r")
    assert setup.shelf.num_free() == 6
    setup.writers.reached["a"] = 1
    setup.arrivals.serve_waiting()
    assert setup.shelf.num_free() == 8
    assert setup.shelf.hits == {}


@pytest.mark.parametrize(("reached", "hits"), [(3, set()), (4, set("xy"))])
def test_a_sender_that_died_after_its_commit_leaves_what_had_arrived(
    reached: int, hits: set[str]
) -> None:
    setup = Setup()
    setup.commit("a", setup.granted("a", "r", "xy"), sequence=4)
    setup.writers.reached["a"] = reached
    setup.writers.ended.add("a")
    setup.arrivals.gone("a")
    assert set(setup.shelf.hits) == hits
    assert setup.shelf.num_free() == 8 - len(hits)


def test_who_looks_for_a_key_waits_for_all_that_arrived_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup, half, go = Setup(), threading.Event(), threading.Event()
    setup.commit("a", setup.granted("a", "r", "xyz"), sequence=1)
    publish = setup.shelf.publish

    def slowly(key: str, page: int) -> None:
        publish(key, page)
        half.set()
        assert go.wait(GUARD_S)

    monkeypatch.setattr(setup.shelf, "publish", slowly)
    setup.writers.reached["a"] = 1
    seen: list[set[str]] = []

    def look() -> None:
        setup.arrivals.publish_arrived()
        seen.append(set(setup.shelf.hits))

    first = threading.Thread(target=setup.arrivals.serve_waiting)
    second = threading.Thread(target=look)
    first.start()
    assert half.wait(GUARD_S)
    second.start()
    second.join(0.2)  # it must not have looked yet
    go.set()
    for thread in (first, second):
        thread.join(GUARD_S)
    assert seen == [set("xyz")]


def test_what_arrives_just_before_its_sender_dies_is_a_hit() -> None:
    setup = Setup()
    setup.commit("a", setup.granted("a", "r", "xy"), sequence=1)
    setup.writers.last_words["a"] = 1
    setup.arrivals.tick(time.monotonic())
    assert set(setup.shelf.hits) == set("xy")
    assert setup.shelf.num_free() == 6


def test_two_senders_of_one_prefix_do_not_depend_on_each_other() -> None:
    # Of LMCache's own back end the second is told that all was sent, and the first then aborts.
    setup = Setup()
    first, second = setup.granted("a", "r", "xy"), setup.granted("b", "r", "xy")
    assert second.already_sent_indexes == []
    setup.abort("a", first)
    assert setup.shelf.hits == {}
    setup.commit("b", second)
    assert set(setup.shelf.hits) == set("xy")
    assert setup.shelf.num_free() == 6


def test_a_second_copy_of_a_hit_gives_its_page_back() -> None:
    setup = Setup()
    first, second = setup.granted("a", "r", "xy"), setup.granted("b", "r", "xy")
    setup.commit("a", first)
    setup.commit("b", second)
    assert setup.shelf.num_free() == 6
    assert setup.shelf.counts == {"x": 2, "y": 2}
    third = setup.granted("c", "r", "xyz")
    assert third.already_sent_indexes == [0, 1]
    assert len(third.remote_indexes) == 1


def test_pages_of_an_abandoned_grant_come_back_once_it_has_ended() -> None:
    setup = Setup()
    answer = setup.granted("a", "r", "xy")
    setup.cancel("a", "r")
    assert setup.shelf.num_free() == 6  # the sender may still be writing
    setup.commit("a", answer)  # its last write has ended
    assert setup.shelf.num_free() == 8
    assert setup.shelf.hits == {}


def test_a_cancel_reaches_its_own_request_alone() -> None:
    setup = Setup()
    mine, other = setup.granted("a", "7", "xy"), setup.granted("b", "7", "pq")
    setup.cancel("b", "7")
    setup.commit("a", mine)
    setup.abort("b", other)
    assert set(setup.shelf.hits) == set("xy")
    assert setup.shelf.num_free() == 6


def test_a_grant_is_ended_once_and_by_its_sender_alone() -> None:
    setup = Setup()
    answer = setup.granted("a", "r", "x")
    with pytest.raises(InvalidUsage, match="is not open"):
        setup.commit("b", answer)
    assert setup.shelf.hits == {}
    setup.commit("a", answer)
    with pytest.raises(InvalidUsage, match="is not open"):
        setup.commit("a", answer)
    setup.abort("a", answer)
    assert set(setup.shelf.hits) == {"x"}


def test_a_request_is_promised_all_of_its_pages_at_once() -> None:
    setup = Setup(num_pages=8)
    setup.granted("a", "1", "ab", is_last_batch=False, total_chunks=6)
    waiting = setup.ask("b", "2", "pqr")  # 6 pages are free, 4 of them promised
    assert waiting == []
    setup.granted("a", "1", "cdef", is_last_batch=True, total_chunks=6)
    assert waiting == []
    setup.arrivals.left("a")
    setup.arrivals.serve_waiting()
    assert [len(answer.remote_indexes) for answer in waiting] == [3]


def test_who_waits_too_long_is_refused_in_words() -> None:
    setup = Setup(num_pages=2, wait_s=0.0)
    setup.granted("a", "1", "ab")
    answer = setup.granted("b", "2", "p")
    assert answer.remote_indexes == [-1]
    assert answer.kvxfer is not None
    assert "were free within" in answer.kvxfer.error


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"total_chunks": 9}, "needs 9 pages of a pool of 8"),
        ({"dtype": "wrong"}, "no such dtype"),
    ],
)
def test_what_can_never_be_is_refused_at_once(fields: dict[str, Any], reason: str) -> None:
    setup = Setup()
    answer = setup.granted("a", "r", "xy", **fields)
    assert answer.remote_indexes == [-1, -1]
    assert answer.kvxfer is not None
    assert reason in answer.kvxfer.error
    assert setup.shelf.num_free() == 8


@pytest.mark.parametrize(("key", "reason"), [(UNREADABLE, "no key"), (PLANTED, "planted")])
def test_a_key_that_cannot_be_looked_for_is_refused_and_costs_nothing(
    key: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup(num_pages=5)
    setup.commit("a", setup.granted("a", "1", "x"))
    answer = setup.granted("b", "2", f"xyz{key}")
    assert answer.remote_indexes == [-1] * 4
    assert answer.kvxfer is not None
    assert answer.kvxfer.error == reason
    assert reason in caplog.text
    assert setup.shelf.num_free() == 4
    assert setup.shelf.counts["x"] == 1
    assert not setup.arrivals.has_waiting
    assert -1 not in setup.granted("c", "3", "pqrs").remote_indexes


def test_a_bad_key_of_a_later_batch_ends_its_request() -> None:
    setup = Setup()
    first = setup.granted("a", "r", "ab", is_last_batch=False, total_chunks=4)
    setup.commit("a", first)
    assert setup.granted("a", "r", f"c{UNREADABLE}", total_chunks=4).remote_indexes == [-1, -1]
    assert setup.shelf.num_free() == 8
    assert setup.arrivals.take_ended() == ((), ("r",))


@pytest.mark.parametrize("connected", [True, False])
def test_a_promise_that_nobody_takes_up_ends_where_its_pages_are_needed(connected: bool) -> None:
    # A prefill was aborted after its first batch, of which its engine tells nobody.
    setup = Setup(num_pages=8)
    setup.shelf.unread_s = -1.0  # what has arrived is of no account here
    first = setup.granted("a", "r", "ab", is_last_batch=False, total_chunks=8, connected=connected)
    if connected:
        setup.commit("a", first)
    waiting = setup.ask("b", "q", "pqrstu")
    assert waiting == []
    setup.rest(LEASE_S)
    setup.arrivals.serve_waiting()
    assert [len(answer.remote_indexes) for answer in waiting] == [6]
    assert setup.arrivals.take_ended() == ((), ("r",))


def test_who_has_lost_its_promise_is_refused_and_not_taken_for_another() -> None:
    setup = Setup(num_pages=4)
    setup.shelf.unread_s = -1.0
    setup.commit("a", setup.granted("a", "r", "ab", is_last_batch=False, total_chunks=4))
    setup.rest(LEASE_S)
    setup.granted("b", "q", "pq")  # takes what was promised
    (answer,) = setup.ask("a", "r", "cd", total_chunks=4)
    assert answer.remote_indexes == [-1, -1]
    assert answer.kvxfer is not None
    assert "raise kvxfer.lease_s" in answer.kvxfer.error
    assert setup.arrivals.take_ended()[1] == ("r",)
    setup.arrivals.left("b")
    assert -1 not in setup.granted("a", "r", "xy").remote_indexes  # another one of that name


def test_a_promise_is_kept_as_long_as_nobody_needs_its_pages() -> None:
    setup = Setup(num_pages=8)
    setup.granted("a", "r", "ab", is_last_batch=False, total_chunks=4)
    setup.rest(LEASE_S)
    assert setup.granted("b", "q", "pq").remote_indexes == [2, 3]
    assert setup.granted("a", "r", "cd", total_chunks=4).remote_indexes == [4, 5]


def test_nothing_is_granted_to_who_does_not_wait_any_more() -> None:
    setup = Setup(num_pages=2)
    setup.granted("a", "1", "ab")
    waiting = setup.ask("b", "2", "p", asker_wait_s=30.0)
    assert waiting == []
    setup.rest(30.0)
    setup.arrivals.serve_waiting()
    setup.arrivals.left("a")  # its pages come too late
    setup.arrivals.serve_waiting()
    assert [answer.remote_indexes for answer in waiting] == [[-1]]
    assert setup.shelf.num_free() == 2


def test_behind_too_many_who_wait_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_MAX_WAITING", 2)
    setup = Setup(num_pages=3)
    setup.granted("a", "1", "x", is_last_batch=False, total_chunks=2)
    waiting = [setup.ask("b", "2", "pq"), setup.ask("b", "3", "pq")]
    assert waiting == [[], []]
    refused = setup.granted("b", "4", "pq")
    assert refused.remote_indexes == [-1, -1]
    assert refused.kvxfer is not None
    assert "with 2 others waiting; raise pd_buffer_size" in refused.kvxfer.error
    assert setup.granted("c", "5", "r").remote_indexes == [1]  # there is a page for it
    assert setup.granted("a", "1", "y", total_chunks=2).remote_indexes == [2]  # promised
    setup.arrivals.left("a")
    setup.arrivals.serve_waiting()
    assert [len(answers) for answers in waiting] == [1, 0]
    assert setup.ask("b", "6", "pq") == []  # there is room in the line again


def test_who_watches_a_receiver_hears_that_it_lives() -> None:
    setup = Setup()
    answer = setup.arrivals.watch("a")
    assert isinstance(answer, DeferredReply)
    now_s = time.monotonic()
    assert setup.arrivals.tick(now_s) <= now_s + 1.0
    setup.arrivals.tick(now_s + 60.0)
    assert not answer.is_open


def test_more_pages_than_were_declared_end_the_request() -> None:
    setup = Setup()
    first = setup.granted("a", "r", "ab", is_last_batch=False, total_chunks=3)
    setup.commit("a", first)
    answer = setup.granted("a", "r", "cd", total_chunks=3)
    assert answer.remote_indexes == [-1, -1]
    assert setup.shelf.num_free() == 8
    assert setup.shelf.hits == {}


def test_a_sender_that_died_leaves_nothing_behind() -> None:
    setup = Setup()
    done = setup.granted("a", "1", "ab", is_last_batch=False, total_chunks=4)
    setup.commit("a", done)
    setup.granted("a", "1", "cd", is_last_batch=False, total_chunks=4)
    setup.arrivals.gone("a")
    assert setup.shelf.num_free() == 4  # it may write on
    setup.writers.ended.add("a")
    setup.arrivals.tick(time.monotonic())
    assert setup.shelf.num_free() == 8


def test_a_grant_to_a_sender_that_never_connects_ends_in_time() -> None:
    setup = Setup()
    setup.writers.unknown.add("a")
    setup.granted("a", "1", "ab")
    setup.arrivals.tick(time.monotonic())
    assert setup.shelf.num_free() == 6
    setup.arrivals.tick(time.monotonic() + 61.0)
    assert setup.shelf.num_free() == 8


def test_hits_that_nobody_fetches_give_way_after_their_lease_alone() -> None:
    setup = Setup(num_pages=2)
    setup.commit("a", setup.granted("a", "1", "ab"))
    waiting = setup.ask("b", "2", "p")
    assert waiting == []
    setup.shelf.unread_s = LEASE_S
    setup.arrivals.serve_waiting()
    assert len(waiting) == 1
    assert set(setup.shelf.hits) == {"b"}


def test_a_sender_without_kvxfer_has_lmcaches_own_rule() -> None:
    setup = Setup()
    answer = setup.granted("a", "r", "xy", connected=False)
    assert answer.kvxfer is None
    assert set(setup.shelf.hits) == set("xy")
