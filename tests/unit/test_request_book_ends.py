"""Senders that leave, die, fall silent or are too late: how the book ends their requests."""

import pytest
from request_books import NUM_BLOCKS, Book, book

from kvxfer.control import DeferredReply, WatchReply, decode, encode
from kvxfer.errors import InvalidUsage, PeerLost, TransferFailed

__all__ = ["book"]  # the fixture


class Clock:
    """In place of the time module."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in ("request_book", "silence", "state_machine"):
        monkeypatch.setattr(f"kvxfer.session.{module}.time", made)
    monkeypatch.setattr("request_books.time", made)
    return made


def test_a_sender_that_leaves_ends_its_requests(book: Book) -> None:
    book.granted("all", "held")
    book.granted("one", "half")
    book.book.left("all")
    assert book.only_notice().request_id == "held"
    assert "left" in book.only_notice().reason
    assert book.pool.num_free == NUM_BLOCKS - 2


def test_a_lost_connection_fails_requests_and_its_process_may_write_on(book: Book) -> None:
    book.granted("all")
    book.book.gone("all")
    assert not book.notices
    assert book.pool.num_free == NUM_BLOCKS - 2
    book.writers.ended.add("all")
    book.tick()
    assert "connection ended" in book.only_notice().reason
    assert book.pool.num_free == NUM_BLOCKS
    assert book.book.num_open == 0


def test_a_lost_connection_of_a_dead_process_ends_it_at_once(book: Book) -> None:
    book.granted("all")
    book.writers.ended.add("all")
    book.book.gone("all")
    assert "process has ended" in book.only_notice().reason
    assert not book.only_notice().quarantined
    assert book.pool.num_free == NUM_BLOCKS


def test_who_has_committed_may_die(book: Book) -> None:
    book.granted("one")
    book.granted("two")
    book.commit("one")
    book.writers.ended.add("one")
    book.book.gone("one")
    book.tick()
    book.commit("two")
    assert book.only_notice().ok


def test_a_quarantine_outlasts_the_notice() -> None:
    book = Book(receive_s=10.0, drain_s=1.0)
    book.granted("all")
    book.tick(11.0)
    assert not book.notices
    book.tick(20.0)
    notice = book.only_notice()
    assert notice.quarantined
    assert "too long" in notice.reason
    assert (book.pool.num_free, book.book.num_open) == (NUM_BLOCKS - 2, 1)
    with pytest.raises(InvalidUsage, match="still written to"):
        book.book.release("r")
    book.book.give_up("r", "again")
    with pytest.raises(TransferFailed, match="too long"):
        book.commit("all")
    assert book.freed == [("r", notice.block_ids)]
    assert (book.pool.num_free, book.book.num_open) == (NUM_BLOCKS, 0)
    assert len(book.notices) == 1


def test_a_receiver_that_slept_looks_first_who_has_died_meanwhile() -> None:
    book = Book(receive_s=10.0, drain_s=1.0)
    book.granted("all")
    book.tick(11.0)  # it drains
    book.writers.ended.add("all")
    book.tick(20.0)
    assert not book.only_notice().quarantined
    assert book.pool.num_free == NUM_BLOCKS


def test_waiting_ends_too() -> None:
    book = Book(wait_s=1.0)
    book.granted("all", "holder", NUM_BLOCKS)
    book.waits("all", "r", 1)
    book.tick(2.0)
    assert book.decided("all") == ["r"]
    assert "it was waiting for too long" in book.refused("all", "r", num_blocks=1)
    assert "it was waiting for too long" in book.only_notice().reason
    assert book.only_notice().block_ids == ()


def test_ticks_are_asked_for_as_long_as_something_is_open(book: Book) -> None:
    assert book.book.tick(5.0) == float("inf")
    book.granted("all")
    assert book.book.tick(5.0) < 6.0


def test_writers_hear_what_was_given_up(book: Book) -> None:
    watch = book.book.watch("one")
    assert isinstance(watch, DeferredReply)
    book.granted("one", "a")
    book.granted("one", "b")
    book.granted("two", "b")
    book.book.give_up("a", "the client went away")
    assert not watch.is_open
    book.abort("two", "b")
    # Nobody waited for that one: it is told to who asks next, and once.
    news = book.book.watch("one")
    assert isinstance(news, WatchReply)
    assert [name for name, _ in news.failures] == ["b"]
    assert "it thought better of it" in news.failures[0][1]
    assert isinstance(book.book.watch("one"), DeferredReply)
    # Whoever has written all is not told, and nobody hears of others' requests.
    assert isinstance(book.book.watch("two"), DeferredReply)
    with pytest.raises(PeerLost):
        book.book.watch("stranger")


def test_a_long_reason_is_cut_to_what_an_answer_may_hold(book: Book) -> None:
    book.granted("one", "a")
    book.book.give_up("a", "x" * 5000)
    news = book.book.watch("one")
    assert isinstance(news, WatchReply)
    assert decode(encode(news), (WatchReply,)) == news


@pytest.mark.parametrize("end", ["left", "gone", "tick"])
def test_nothing_is_kept_for_who_has_ended(book: Book, end: str) -> None:
    book.granted("one", "holds", NUM_BLOCKS - 2)
    book.granted("two", "writes")
    for number in range(3):
        book.waits("two", f"r-{number}", 4)
    book.book.give_up("writes", "why not")
    assert book.book._news._news
    book.writers.ended.add("two")
    if end == "tick":
        book.tick()
    else:
        getattr(book.book, end)("two")
    assert not book.book._news._news


def test_news_are_kept_for_a_caller_that_asks_again(book: Book) -> None:
    watch = book.book.watch("one")
    assert isinstance(watch, DeferredReply)
    book.granted("one", "a")
    watch.abandon()
    book.book.give_up("a", "why not")
    news = book.book.watch("one")
    assert isinstance(news, WatchReply)
    book.granted("one", "b")
    book.book.give_up("b", "why not")
    book.book.left("one")
    assert isinstance(book.book.watch("one"), DeferredReply)


def test_a_sender_that_gave_signs_of_life_and_stops_is_lost(book: Book) -> None:
    book.granted("one", "a")
    book.granted("all", "quiet")  # it never watched: nothing follows from its silence
    book.book.watch("one")
    book.tick(2.0)
    book.tick(4.0)
    assert not book.notices
    book.tick(6.0)
    book.tick(6.1)
    assert book.book.num_open == 2
    book.writers.ended.add("one")
    book.tick(6.2)
    assert book.only_notice().request_id == "a"
    assert "silent" in book.only_notice().reason


def test_who_slept_gives_others_their_time_again(book: Book) -> None:
    book.granted("one")
    book.book.watch("one")
    book.tick(20.0)
    book.writers.ended.add("one")
    book.tick(20.1)
    assert "process has ended" in book.only_notice().reason  # and not that it was silent


def test_a_watch_without_news_is_answered_all_the_same(book: Book, clock: Clock) -> None:
    watch = book.book.watch("one")
    assert isinstance(watch, DeferredReply)
    assert book.book.tick(clock.now_s) < clock.now_s + 1.5
    assert watch.is_open
    clock.now_s += 1.1
    book.tick()
    assert not watch.is_open
