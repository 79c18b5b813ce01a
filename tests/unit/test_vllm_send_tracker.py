"""The prefill side in the scheduler: every token of an attempt is made ready once."""

from typing import Any

import pytest

from kvxfer.connectors.vllm.params import ReceiverAddress, SendParams
from kvxfer.connectors.vllm.send_tracker import SendTracker
from kvxfer.connectors.vllm.step import StepPlan, Table

PARAMS = SendParams("t", (ReceiverAddress("tcp://h:1", "tcp://h:2"),))
SIZE = 16


def tracker(num_prompt_tokens: int = 100, groups: int = 1) -> SendTracker:
    made = SendTracker([SIZE] * groups)
    made.admit("r", PARAMS, num_prompt_tokens)
    return made


def run(made: SendTracker, blocks: Any, computed: int, scheduled: int, **args: Any) -> StepPlan:
    args = {"replaces": False, **args}
    groups = None if blocks is None else (blocks if isinstance(blocks, tuple) else (blocks,))
    made.scheduled(
        "r", groups, num_computed_tokens=computed, num_scheduled_tokens=scheduled, **args
    )
    return taken(made)


def taken(made: SendTracker) -> StepPlan:
    plan = StepPlan()
    made.take(plan)
    return plan


def test_a_prompt_that_runs_in_one_step_is_one_part() -> None:
    plan = run(tracker(), range(7), 0, 100, replaces=True)
    (start,) = plan.starts
    assert (start.transfer_id, start.attempt, start.num_tokens) == ("t", 1, 99)
    (part,) = plan.parts
    assert (part.tokens, part.is_last) == ((0, 99), True)
    assert part.tables == (Table(tuple(range(7)), 0),)


def test_chunks_follow_each_other_and_share_the_block_that_neither_fills() -> None:
    made = tracker()
    first = run(made, [9, 8, 7], 0, 40, replaces=True)
    second = run(made, [6, 5], 40, 40)
    third = run(made, [4, 3], 80, 20)
    parts = [plan.parts[0] for plan in (first, second, third)]
    assert [one.tokens for one in parts] == [(0, 40), (40, 80), (80, 99)]
    assert [one.is_last for one in parts] == [False, False, True]
    assert parts[1].tables == (Table((7, 6, 5), 32),)
    assert parts[2].tables == (Table((4, 3), 80),)
    assert [len(plan.starts) for plan in (first, second, third)] == [1, 0, 0]


def test_what_the_prefix_cache_has_goes_with_the_first_step() -> None:
    (part,) = run(tracker(), range(7), 64, 36, replaces=True).parts
    assert part.tokens == (0, 99)


def test_the_last_token_alone_makes_nothing_ready() -> None:
    made = tracker()
    assert run(made, range(7), 0, 99, replaces=True).parts[0].is_last
    assert run(made, None, 99, 1).parts == []
    assert run(made, None, 100, 1).parts == []  # decoding


@pytest.mark.parametrize("num_prompt_tokens", [0, 1])
def test_of_a_prompt_without_two_tokens_nothing_is_sent(num_prompt_tokens: int) -> None:
    made = tracker(num_prompt_tokens)
    assert run(made, [3], 0, num_prompt_tokens, replaces=True) == StepPlan()
    assert not made.finished("r", normally=True)


def test_a_preempted_request_begins_anew_at_once() -> None:
    made = tracker()
    run(made, range(3), 0, 40, replaces=True)
    made.preempted(["r", "unknown"])
    assert [one.attempt for one in taken(made).starts] == [2]
    made.admit("r", PARAMS, 100)
    plan = run(made, range(20, 27), 16, 84, replaces=True)
    assert plan.starts == []
    assert (plan.parts[0].tokens, plan.parts[0].tables[0].block_ids[0]) == ((0, 99), 20)


def test_a_request_that_lost_its_blocks_unsaid_begins_anew_too() -> None:
    made = tracker()
    run(made, range(3), 0, 40, replaces=True)
    plan = run(made, range(20, 27), 0, 100, replaces=True)
    assert [one.attempt for one in plan.starts] == [2]
    assert plan.parts[0].tokens == (0, 99)


def test_a_request_that_was_never_run_begins_once() -> None:
    made = tracker()
    made.preempted(["r"])
    assert taken(made).starts == []


def test_blocks_stay_until_all_ranks_have_sent() -> None:
    made = tracker()
    run(made, range(7), 0, 100, replaces=True)
    assert made.finished("r", normally=True)
    assert made.is_ending
    assert taken(made).cancelled == []
    made.sent({"r"})
    assert not made.is_ending


@pytest.mark.parametrize(("scheduled", "normally"), [(40, True), (100, False)])
def test_what_is_incomplete_or_aborted_is_cancelled(scheduled: int, normally: bool) -> None:
    made = tracker()
    run(made, range(7), 0, scheduled, replaces=True)
    assert made.finished("r", normally=normally)
    assert taken(made).cancelled == ["r"]


def test_a_request_that_ends_while_it_is_preempted_is_cancelled() -> None:
    made = tracker()
    run(made, range(7), 0, 100, replaces=True)
    made.preempted(["r"])
    assert made.finished("r", normally=True)  # its token came from a step that was under way
    assert taken(made).cancelled == ["r"]


def test_a_request_that_was_never_run_keeps_no_blocks() -> None:
    assert not tracker().finished("r", normally=False)
    assert not SendTracker([SIZE]).finished("other", normally=True)


def test_every_group_has_its_own_blocks() -> None:
    made = tracker(groups=2)
    first = run(made, ([1, 2, 3], [11, 12, 13]), 0, 40, replaces=True)
    second = run(made, ([4, 5], [14, 15]), 40, 40)
    assert [one.block_ids for one in first.parts[0].tables] == [(1, 2, 3), (11, 12, 13)]
    assert [one.block_ids for one in second.parts[0].tables] == [(3, 4, 5), (13, 14, 15)]


def test_blocks_that_a_window_left_behind_stay_in_a_source_and_go_from_a_target() -> None:
    table = Table.covering([0, 0, 7, 8], SIZE, (0, 60))
    assert table == Table((0, 0, 7, 8), 0)
    assert table.without_left(SIZE) == Table((7, 8), 2 * SIZE)
    assert Table((0, 0), 0).without_left(SIZE) == Table((), 2 * SIZE)
