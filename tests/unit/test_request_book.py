"""What the book of a receiver answers, and when a request is complete."""

import pytest
from request_books import NUM_BLOCKS, Book, book

from kvxfer.errors import InvalidUsage, PeerLost, TransferFailed
from kvxfer.session.offers import Notice

__all__ = ["book"]  # the fixture


def test_a_request_is_complete_once_every_head_was_committed(book: Book) -> None:
    assert book.granted("one") == book.granted("two")
    book.commit("two")
    assert not book.notices
    book.commit("one")
    assert book.only_notice().ok
    assert book.pool.num_free == NUM_BLOCKS - 2


def test_a_commit_may_be_repeated(book: Book) -> None:
    book.granted("one")
    book.granted("two")
    book.commit("one")
    book.commit("one")
    assert not book.notices
    book.commit("two")
    book.commit("two")
    book.commit("one")
    assert book.only_notice().ok


def test_a_request_fails_only_when_no_rank_writes_any_more(book: Book) -> None:
    book.granted("one")
    book.granted("two")
    book.abort("one")
    assert not book.notices
    assert book.pool.num_free == NUM_BLOCKS - 2
    with pytest.raises(TransferFailed, match="it thought better of it"):
        book.commit("two")
    assert not book.only_notice().ok
    assert book.pool.num_free == NUM_BLOCKS


def test_a_rank_that_comes_after_a_failure_is_told_why(book: Book) -> None:
    book.granted("one")
    book.abort("one")
    assert "it thought better of it" in book.refused("two")
    assert not book.only_notice().ok


def test_late_calls_change_nothing(book: Book) -> None:
    book.granted("all", "good")
    book.commit("all", "good")
    book.granted("all", "bad")
    book.abort("all", "bad")
    free = book.pool.num_free
    book.abort("all", "good")
    book.abort("all", "bad")
    book.commit("all", "good")
    with pytest.raises(TransferFailed, match="'bad' has failed: its sender aborted"):
        book.commit("all", "bad")
    assert "is committed already" in book.refused("all", "good")
    assert "has failed" in book.refused("all", "bad")
    assert (book.pool.num_free, len(book.notices)) == (free, 2)


def test_the_pool_keeps_blocks_until_the_engine_releases_them(book: Book) -> None:
    book.granted("all")
    with pytest.raises(InvalidUsage, match="still written to"):
        book.book.release("r")
    book.commit("all")
    for _ in range(2):
        book.book.release("r")
        assert book.pool.num_free == NUM_BLOCKS


def test_another_sender_under_the_same_name_is_refused(book: Book) -> None:
    book.granted("one-a")
    assert "sent by another sender already" in book.refused("one-b")
    assert "sent by another sender already" in book.refused("all")
    book.granted("two-a")


def test_what_does_not_fit_together_is_refused(book: Book) -> None:
    book.granted("one")
    assert "use a new id" in book.refused("two", num_blocks=3)
    assert "use a new id" in book.refused("two", tokens=(1, 8))
    assert "has no part" in book.refused("none", "other")
    with pytest.raises(PeerLost, match="not known"):
        book.reserve("stranger")
    with pytest.raises(InvalidUsage, match="are 2 blocks of 4 tokens here, not 3"):
        book.reserve("all", "other", 3, tokens=(0, 8))
    assert "can never be served" in book.refused("all", "large", num_blocks=NUM_BLOCKS + 1)


def test_commits_of_what_is_not_held_are_refused(book: Book) -> None:
    with pytest.raises(InvalidUsage, match="holds no blocks of this sender"):
        book.commit("all")
    book.granted("one")
    with pytest.raises(InvalidUsage, match="holds no blocks of this sender"):
        book.commit("two")
    book.granted("all", "holder", NUM_BLOCKS - 2)
    book.waits("all", "waiter", 1)
    with pytest.raises(InvalidUsage, match="holds no blocks yet"):
        book.commit("all", "waiter")


def test_a_commit_is_believed_only_once_its_bytes_are_visible(book: Book) -> None:
    book.granted("all")
    book.writers.invisible.add("all")
    with pytest.raises(TransferFailed, match="transfer 1 of request 'r' is not visible yet"):
        book.commit("all")
    assert not book.notices
    book.writers.invisible.clear()
    book.commit("all")
    assert book.only_notice().ok


def test_waiting_requests_are_served_in_their_order(book: Book) -> None:
    book.granted("all", "holder", 6)
    for name, size in (("a", 4), ("b", 1), ("c", 1)):
        book.waits("all", name, size)
    assert book.pool.num_free == 2
    book.commit("all", "holder")
    book.book.release("holder")
    assert book.decided("all") == ["a", "b", "c"]
    assert len(book.granted("all", "a", 4)) == 4
    assert book.pool.num_free == 2


def test_a_request_that_gives_up_lets_the_next_pass(book: Book) -> None:
    book.granted("all", "holder", 6)
    book.waits("all", "large", 4)
    book.waits("all", "small", 1)
    book.abort("all", "large")
    assert book.decided("all") == ["small"]
    assert "it thought better of it" in book.refused("all", "large", num_blocks=4)
    assert len(book.granted("all", "small", 1)) == 1
    assert book.pool.num_free == 1


def test_an_abort_that_overtakes_its_reservation_ends_the_request_for_all(book: Book) -> None:
    book.abort("one")
    for who in ("one", "two", "one-restarted"):
        assert "sender aborted: it thought better of it" in book.refused(who)
    with pytest.raises(TransferFailed, match="it thought better of it"):
        book.commit("two")
    assert (book.book.num_open, book.pool.num_free, book.notices) == (0, NUM_BLOCKS, [])


def test_a_rank_that_gives_up_before_it_asks_ends_the_request_for_all(book: Book) -> None:
    book.granted("one")
    book.abort("two")
    with pytest.raises(TransferFailed, match="it thought better of it"):
        book.commit("one")
    assert not book.only_notice().ok
    assert "it thought better of it" in book.refused("two")
    assert book.pool.num_free == NUM_BLOCKS


def test_how_a_request_ended_stays_whatever_comes_late(book: Book) -> None:
    book.granted("one")
    book.granted("two")
    book.commit("one")
    book.commit("two")
    book.abort("two-restarted")
    assert "is committed already" in book.refused("one-restarted")
    book.commit("one")
    assert book.only_notice().ok


def test_the_abort_of_a_stranger_ends_nothing(book: Book) -> None:
    book.granted("one")
    assert "sent by another sender already" in book.refused("one-other")
    book.abort("one-other")
    book.abort("none")
    book.abort("none", "later")
    with pytest.raises(PeerLost, match="not known"):
        book.abort("stranger", "later")
    book.granted("two")
    book.granted("all", "later")
    assert not book.notices


def test_a_rank_without_a_share_opens_nothing(book: Book) -> None:
    assert "has no part" in book.refused("none")
    assert (book.book.num_open, book.pool.num_free) == (0, NUM_BLOCKS)


def test_too_many_requests_have_to_ask_again() -> None:
    book = Book(num_requests=1)
    book.granted("all", "a", 1)
    reply = book.reserve("all", "b", 1)
    assert reply.state == "wait"
    book.commit("all", "a")
    book.granted("all", "b", 1)


def test_closing_tells_what_is_open(book: Book) -> None:
    book.granted("all", "held")
    book.granted("all", "large", NUM_BLOCKS - 2)
    book.waits("all", "waiter", 1)
    book.book.close()
    book.book.close()
    assert sorted(notice.request_id for notice in book.notices) == ["held", "large", "waiter"]
    assert {notice.quarantined for notice in book.notices} == {True, False}


def test_a_callback_that_fails_harms_nobody(book: Book, caplog: pytest.LogCaptureFixture) -> None:
    def fail(notice: Notice) -> None:
        raise ValueError("a fault of the engine")

    book.book._on_notice = fail
    book.granted("all")
    book.commit("all")
    assert "a fault of the engine" in caplog.text
    book.granted("all", "next")


def test_who_waits_hears_once_that_it_need_not(book: Book) -> None:
    book.granted("one", "holds", NUM_BLOCKS)
    for who in ("one", "two"):
        book.waits(who, "r", 2)
    book.abort("one", "holds")
    assert book.decided("two") == ["r"]
    assert book.granted("one") == book.granted("two")
    assert book.news("two") is None


def test_who_does_not_listen_asks_again_soon(book: Book) -> None:
    book.granted("all", "holds", NUM_BLOCKS)
    assert book.reserve("all-a", "r", 1).retry_after_s < 0.1
    assert book.waits("all-a", "r", 1) > 1.0
    assert book.reserve("all-a", "r", 1).retry_after_s < 0.1
    book.abort("all", "holds")
    assert book.news("all-a") is None


def test_that_a_request_has_failed_is_all_that_its_writer_hears(book: Book) -> None:
    book.granted("all", "holds", NUM_BLOCKS)
    book.waits("all-a", "r", 1)
    book.abort("all", "holds")  # so r has blocks
    book.book.give_up("r", "the client went away")
    news = book.news("all-a")
    assert news is not None
    assert news.decided == []
    assert news.failures == [("r", "the client went away")]
