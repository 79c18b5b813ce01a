"""The decode side in a worker: each placed request ends once, and not before its last writer."""

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvxfer.connectors.vllm.counters import Counters
from kvxfer.connectors.vllm.pages import Pages
from kvxfer.connectors.vllm.params import attempt_id
from kvxfer.connectors.vllm.receive_side import Ended, ReceiveSide
from kvxfer.connectors.vllm.step import GivenUp, Placement, StepPlan, Table
from kvxfer.errors import InvalidUsage
from kvxfer.layout import BlockTable, KVLayout
from kvxfer.session import Deferred, Granted, Notice, Offer, Receiver, Refused

LAYOUT = KVLayout(2, 1, head_dim=8, block_size=16)
TOKENS = range(40)
TABLES = (Table((7, 8, 9), 0),)
FAILED = Ended("r", frozenset({7, 8, 9}), is_failed=True)
LATER_S = 1e9
SOON_S = 1.0  # from now; a sender that never came is awaited for 100 s


class Side(ReceiveSide):
    """With a receiver that only notes what it is asked to abort."""

    def __init__(self, **args: Any) -> None:
        self.counted = Counters()
        super().__init__(Pages(16), self.counted, timeout_s=100.0, **args)
        self.aborted: list[str] = []
        receiver = SimpleNamespace(abort=lambda name, reason: self.aborted.append(name))
        self.attach(cast(Receiver, receiver), LAYOUT)

    def place(self, *, awaited: bool = True) -> None:
        tables = TABLES if awaited else ()
        placement = Placement("r", "t", len(TOKENS), tables, awaited)
        self.begin_step(StepPlan(placements=[placement]))

    def give_up(self) -> None:
        self.begin_step(StepPlan(given_up=[GivenUp("t", "aborted")]))

    def offer(self, number: int = 1, *, tokens: range = TOKENS, form: str = "plain") -> Any:
        return self.on_reserve(Offer(attempt_id("t", number, form), tokens, (range(3),)))

    def notice(self, number: int = 1, reason: str = "", *, quarantined: bool = False) -> None:
        tables = (BlockTable([7, 8, 9]),)
        name = attempt_id("t", number, "plain")
        self.on_notice(Notice(name, TOKENS, tables, reason, quarantined))


def answer_of(deferred: Deferred) -> Granted | Refused | None:
    found: list[Any] = []
    deferred.bind(lambda answer: bool(found.append(answer) or True))
    return found[0] if found else None


def test_blocks_that_are_there_are_granted_at_once() -> None:
    side = Side()
    side.place()
    assert side.offer().tables[0].block_ids.tolist() == [7, 8, 9]
    side.notice()
    assert side.take_ended() == [Ended("r")]
    assert side.take_ended(LATER_S) == []
    assert side.counted.take()["received_bytes"] == 2 * 40 * LAYOUT.bytes_per_token_per_layer


def test_a_sender_that_comes_first_waits_for_the_blocks() -> None:
    side = Side()
    asked = side.offer()
    assert answer_of(asked) is None
    side.place()
    assert isinstance(answer_of(asked), Granted)


def test_blocks_that_do_not_fit_fail_one_request() -> None:
    side = Side()
    asked = side.offer()
    given: list[Any] = []

    def take(answer: Granted | Refused) -> bool:
        given.append(answer)
        if isinstance(answer, Granted):
            raise InvalidUsage("blocks 7 may still be written")
        return True

    asked.bind(take)
    side.place()
    assert [type(one) for one in given] == [Granted, Refused]
    side.notice(1, given[1].reason)
    assert side.take_ended(LATER_S) == [FAILED]


def test_a_request_that_needs_nothing_is_not_reported() -> None:
    side = Side()
    side.place(awaited=False)
    assert side.offer().tables[0].block_ids.size == 0
    side.notice()
    assert side.take_ended(LATER_S) == []


def test_nobody_comes() -> None:
    side = Side()
    side.place()
    assert side.take_ended(0.0) == []
    assert side.take_ended(LATER_S) == [FAILED]
    assert isinstance(side.offer(), Refused)


def test_a_failure_waits_for_another_attempt_first() -> None:
    side = Side()
    side.place()
    side.offer(1)
    side.notice(1, "its sender aborted")
    assert side.take_ended(0.0) == []
    assert isinstance(side.offer(2), Granted)
    side.notice(2)
    assert side.take_ended(LATER_S) == [Ended("r")]
    assert side.counted.take()["num_retries"] == 1


def test_a_later_attempt_takes_the_place_of_one_that_writes() -> None:
    side = Side()
    side.place()
    side.offer(1)
    following = side.offer(2)
    assert side.aborted == [attempt_id("t", 1, "plain")]
    assert answer_of(following) is None  # the first may still write
    side.notice(1, "a later attempt takes its place")
    assert isinstance(answer_of(following), Granted)
    side.notice(2)
    assert side.take_ended(LATER_S) == [Ended("r")]
    assert side.counted.take()["num_retries"] == 1


def test_an_attempt_that_was_overtaken_is_refused() -> None:
    side = Side()
    side.place()
    side.offer(2)
    assert isinstance(side.offer(1), Refused)
    assert isinstance(side.offer(2), Refused)


@pytest.mark.parametrize("placed", [True, False])
def test_of_two_that_wait_the_later_one_stays(placed: bool) -> None:
    side = Side()
    if placed:
        side.place()
        side.offer(1)
    earlier, later = side.offer(2), side.offer(3)
    assert isinstance(answer_of(earlier), Refused)
    assert answer_of(later) is None


def test_an_attempt_that_ends_while_it_waits_is_forgotten() -> None:
    side = Side()
    side.offer(1)
    side.notice(1, "its sender left")
    side.place()
    side.offer(2)
    waiting = side.offer(3)
    side.notice(3, "its sender left")
    side.notice(2, "its sender left")
    assert answer_of(waiting) is None
    assert side.take_ended(LATER_S) == [FAILED]


def test_a_request_whose_sender_left_before_it_was_placed_fails_soon() -> None:
    side = Side()
    side.offer(1)
    side.notice(1, "its sender left")
    side.place()
    assert side.take_ended(time.monotonic() + SOON_S) == [FAILED]


def test_an_attempt_after_one_that_left_before_the_request_was_placed_is_awaited() -> None:
    side = Side()
    side.offer(1)
    side.notice(1, "a later attempt takes its place")
    waiting = side.offer(2)
    side.place()
    assert isinstance(answer_of(waiting), Granted)
    assert side.take_ended(time.monotonic() + SOON_S) == []


def test_blocks_in_quarantine_are_held_back() -> None:
    side = Side()
    side.place()
    side.offer()
    side.notice(1, "hangs", quarantined=True)
    assert side.take_ended(LATER_S) == []
    assert side.counted.take()["num_quarantined_blocks"] == 3
    side.on_free(attempt_id("t", 1, "plain"), (7, 8, 9))
    assert side.take_ended(LATER_S) == [FAILED]
    assert side.counted.take()["num_quarantined_blocks"] == 0


def test_blocks_that_were_not_taken_are_no_quarantine() -> None:
    side = Side()
    side.place()
    side.offer()
    side.on_free(attempt_id("t", 1, "plain"), (7, 8, 9))
    side.notice(1, "it ended meanwhile")
    assert side.take_ended(LATER_S) == [FAILED]
    assert side.counted.take()["num_quarantined_blocks"] == 0


def test_a_request_that_is_given_up_ends_with_its_writer() -> None:
    side = Side()
    side.place()
    side.offer()
    side.give_up()
    assert side.take_ended(LATER_S) == []
    side.notice(1, "aborted")
    assert side.take_ended(LATER_S) == [Ended("r")]
    assert "num_failed_receives" not in side.counted.take()


def test_a_request_that_is_given_up_before_a_sender_came_ends_at_once() -> None:
    side = Side()
    side.place()
    side.give_up()
    assert side.take_ended() == [Ended("r")]
    assert isinstance(side.offer(), Refused)


def test_a_sender_that_waits_for_a_request_that_is_given_up_is_refused() -> None:
    side = Side()
    waiting = side.offer()
    side.give_up()
    assert isinstance(answer_of(waiting), Refused)
    assert side.take_ended(LATER_S) == []


@pytest.mark.parametrize(
    "offered", [{"tokens": range(39)}, {"tokens": range(1, 40)}, {"form": "cpu-vec"}]
)
def test_what_is_not_expected_is_refused_and_fails(offered: dict[str, Any]) -> None:
    side = Side()
    side.place()
    refused = side.offer(**offered)
    assert isinstance(refused, Refused)
    assert side.take_ended() == [FAILED]


def test_a_failure_that_cannot_be_told_is_kept_until_the_request_is_aborted() -> None:
    side = Side(tells_failures=False)
    side.place()
    side.offer()
    side.notice(1, "lost")
    assert side.take_ended(LATER_S) == []
    assert isinstance(side.offer(2), Refused)
    side.give_up()
    assert side.take_ended() == [Ended("r")]
    assert side.counted.take()["num_failed_receives"] == 1


def test_counts_are_taken_once() -> None:
    counters = Counters()
    counters.add_sent(5, 0.5)
    counters.add_sent(6, 0.25)
    assert counters.take() == {
        "num_sends": 2,
        "sent_bytes": 11,
        "send_s": [0.5, 0.25],
        "num_quarantined_blocks": 0,
    }
    assert counters.take() == {}


def test_a_quarantine_that_goes_unread_is_still_known() -> None:
    counters = Counters()
    counters.add_quarantined(3)
    counters.add(num_retries=1)
    assert counters.take() == {"num_retries": 1, "num_quarantined_blocks": 3}
    assert counters.take() == {}
    counters.add_quarantined(-3)
    assert counters.take() == {"num_quarantined_blocks": 0}
