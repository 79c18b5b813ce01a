"""What a receiver of LMCache's tells its scheduler: which requests are over, and how."""

from lmcache_grants import Setup


def test_a_request_is_told_when_all_of_it_is_there() -> None:
    setup = Setup()
    first = setup.granted("s", "r", "ab", is_last_batch=False, total_chunks=3)
    last = setup.granted("s", "r", "c", total_chunks=3)
    setup.commit("s", last, 2)
    assert setup.arrivals.take_ended() == ((), ())
    setup.writers.reached["s"] = 2
    setup.commit("s", first, 1)
    assert setup.arrivals.take_ended() == (("r",), ())
    assert setup.arrivals.take_ended() == ((), ())  # told once


def test_what_is_on_its_way_is_told_once_it_has_arrived() -> None:
    setup = Setup()
    setup.commit("s", setup.granted("s", "r", "ab"), 1)  # its bytes are not there
    assert setup.arrivals.take_ended() == ((), ())
    setup.writers.reached["s"] = 1
    assert setup.arrivals.take_ended() == (("r",), ())


def test_what_is_there_already_is_told_at_once() -> None:
    setup = Setup()
    setup.commit("s", setup.granted("s", "r", "ab"))
    setup.granted("t", "q", "ab")
    assert setup.arrivals.take_ended() == (("r", "q"), ())


def test_a_part_that_is_lost_loses_the_request() -> None:
    setup = Setup()
    first = setup.granted("s", "r", "a", is_last_batch=False, total_chunks=2)
    setup.abort("s", first)
    assert setup.arrivals.take_ended() == ((), ("r",))


def test_a_request_that_is_refused_is_lost() -> None:
    setup = Setup(num_pages=2)
    setup.granted("s", "r", "abc")
    assert setup.arrivals.take_ended() == ((), ("r",))


def test_a_request_that_is_cancelled_before_it_has_pages_is_lost() -> None:
    setup = Setup(num_pages=2)
    setup.granted("s", "q", "ab")
    setup.ask("s", "r", "cd")
    setup.cancel("s", "r")
    assert setup.arrivals.take_ended() == ((), ("r",))


def test_a_sender_that_dies_loses_its_requests() -> None:
    setup = Setup()
    setup.granted("s", "r", "ab")
    setup.arrivals.left("s")
    assert setup.arrivals.take_ended() == ((), ("r",))


def test_who_names_no_request_is_not_told_of() -> None:
    setup = Setup()
    setup.commit("s", setup.granted("s", "", "ab"))
    assert setup.arrivals.take_ended() == ((), ())
