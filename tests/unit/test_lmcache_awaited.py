"""Requests that wait in a scheduler for their KV: when waiting is over, and what is kept of it."""

import logging

import pytest

from kvxfer.connectors.lmcache import awaited
from kvxfer.connectors.lmcache.awaited import Awaited, Ended, num_receivers

TIMEOUT_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def made(clock: Clock, num_ranks: int = 1) -> Awaited:
    return Awaited(num_ranks, TIMEOUT_S, clock)


def test_a_request_waits_for_every_rank(clock: Clock) -> None:
    waiting = made(clock, num_ranks=3)
    waiting.note(["one"], [])
    assert not waiting.is_over("r", "one")
    waiting.note(["one", "other"], [])
    assert not waiting.is_over("r", "one")
    waiting.note(["one"], [])
    assert waiting.is_over("r", "one")
    assert waiting.is_over("r", "one")  # asked again, for want of blocks
    assert not waiting.is_over("s", "other")


def test_what_ranks_tell_in_one_step_counts_for_each(clock: Clock) -> None:
    waiting = made(clock, num_ranks=2)
    waiting.note(["one", "one"], [])  # before the request is known here
    assert waiting.is_over("r", "one")


def test_a_rank_that_lost_it_ends_the_waiting(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = made(clock, num_ranks=2)
    assert not waiting.is_over("r", "one")
    waiting.note(["one"], ["one"])
    with caplog.at_level(logging.WARNING):
        assert waiting.is_over("r", "one")
        assert waiting.is_over("r", "one")
    (told,) = caplog.messages
    assert told.startswith("request r: its KV (transfer 'one') was lost")


def test_nobody_waits_longer_than_the_limit(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    waiting = made(clock)
    assert not waiting.is_over("r", "one")
    clock.now_s += TIMEOUT_S - 1
    assert not waiting.is_over("r", "one")
    clock.now_s += 2
    with caplog.at_level(logging.WARNING):
        assert waiting.is_over("r", "one")
        assert waiting.is_over("r", "one")
    (told,) = caplog.messages
    assert "within 30 s" in told
    assert not waiting.is_over("s", "one")  # each request has its own time


def test_a_request_that_is_preempted_waits_no_second_time(clock: Clock) -> None:
    waiting = made(clock)
    waiting.note(["one"], [])
    assert waiting.is_over("r", "one")
    waiting.note([f"{number}" for number in range(awaited._MAX_TRANSFERS)], [])
    assert waiting.is_over("r", "one")


def test_nobody_waits_where_nobody_receives(clock: Clock) -> None:
    assert made(clock, num_ranks=0).is_over("r", "one")


class Config:
    """Of an LMCache engine."""

    enable_pd = True
    pd_role = "receiver"

    def __init__(self, **extra: object) -> None:
        self._extra = extra

    def get_extra_config_value(self, name: str, default: object) -> object:
        return self._extra.get(name, default)


def test_who_receives_depends_on_the_engine() -> None:
    every, mla = {"world_size": 4, "is_mla": False}, {"world_size": 4, "is_mla": True}
    assert num_receivers(Config(), **every) == 4
    assert num_receivers(Config(), **mla) == 1
    assert num_receivers(Config(save_only_first_rank=False), **mla) == 4
    sender, alone = Config(), Config()
    sender.pd_role, alone.enable_pd = "sender", False
    assert num_receivers(sender, **every) == num_receivers(alone, **every) == 0


def test_an_id_that_is_used_again_has_its_time_anew(clock: Clock) -> None:
    waiting = made(clock)
    assert not waiting.is_over("r", "one")
    waiting.forget("r")
    waiting.forget("r")
    clock.now_s += TIMEOUT_S + 1
    assert not waiting.is_over("r", "other")


def test_transfers_that_nobody_asks_for_are_forgotten(clock: Clock) -> None:
    waiting = made(clock)
    waiting.note(["first"], ["second"])
    waiting.note([f"{number}" for number in range(awaited._MAX_TRANSFERS)], [])
    assert len(waiting._missing) == awaited._MAX_TRANSFERS
    assert not waiting._lost
    assert not waiting.is_over("r", "first")
    assert waiting.is_over("s", "0")


def test_nothing_ended_is_nothing_to_tell() -> None:
    assert not any(Ended())
    assert any(Ended(lost=("one",)))


def test_nobody_waits_for_ranks_at_which_nothing_arrives(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = made(clock, num_ranks=2)
    assert not waiting.is_over("r", "one")
    with caplog.at_level(logging.ERROR):
        waiting.stop()
        waiting.stop()
    assert len(caplog.messages) == 1
    assert waiting.is_over("r", "one")
    assert waiting.is_over("s", "other")
