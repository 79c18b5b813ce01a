"""The connector in vLLM's scheduler: what it takes from requests and steps."""

import logging

import pytest
from vllm_fakes import blocks, finished, receive_params, request, send_params, step

from kvxfer.connectors.vllm.scheduler_side import SchedulerSide
from kvxfer.connectors.vllm.step import StepPlan, Table

SIZE = 16


def side(*, is_producer: bool = True, is_consumer: bool = True, groups: int = 1) -> SchedulerSide:
    return SchedulerSide([SIZE] * groups, is_producer=is_producer, is_consumer=is_consumer)


def test_a_decode_request_waits_for_its_prompt() -> None:
    scheduler = side()
    asked = request("r", receive_params("t"))
    assert scheduler.num_new_matched_tokens(asked, 32) == (67, True)
    scheduler.allocated(asked, blocks(range(7)), 67)
    (placement,) = scheduler.build_plan(step()).placements
    assert placement.tables == (Table((2, 3, 4, 5, 6), 32),)
    scheduler.reported(finished(recving=["r"]))
    assert scheduler.num_new_matched_tokens(asked, 96) == (0, False)


def test_blocks_that_a_window_left_behind_are_not_placed() -> None:
    scheduler = side(groups=2)
    scheduler.allocated(
        request("r", receive_params("t")), blocks(range(1, 8), [0, 0, 0, 0, 11, 12, 13]), 99
    )
    (placement,) = scheduler.build_plan(step()).placements
    assert placement.tables == (Table((1, 2, 3, 4, 5, 6, 7), 0), Table((11, 12, 13), 64))


def test_children_of_one_request_are_asked_again_later() -> None:
    scheduler = side()
    first, second = (request(f"{number}_r", receive_params("t")) for number in (0, 1))
    scheduler.allocated(first, blocks(range(7)), 99)
    assert scheduler.num_new_matched_tokens(second, 0) == (None, False)


def test_logprobs_of_the_prompt_are_computed_here() -> None:
    scheduler = side()
    asked = request("r", receive_params("t"), prompt_logprobs=1)
    assert scheduler.num_new_matched_tokens(asked, 0) == (0, False)
    scheduler.allocated(asked, blocks(range(7)), 0)
    (placement,) = scheduler.build_plan(step()).placements
    assert not placement.awaited


def test_a_request_that_skips_the_prefix_cache_is_computed_here() -> None:
    asked = request("r", receive_params("t"))
    asked.skip_reading_prefix_cache = True
    assert side().num_new_matched_tokens(asked, 0) == (0, False)


@pytest.mark.parametrize("params", [None, {}, {"kvxfer": {"role": "receive"}}, {"kvxfer": 7}])
def test_a_request_that_says_nothing_sensible_is_like_any_other(
    params: object, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = side()
    plain = request("r", params)
    with caplog.at_level(logging.ERROR):
        assert scheduler.num_new_matched_tokens(plain, 0) == (0, False)
        scheduler.allocated(plain, blocks(range(7)), 0)
        assert scheduler.build_plan(step(new={"r": (range(7), 0, 100)})) == StepPlan()
        assert not scheduler.finished(plain)
    assert len(caplog.records) == (1 if params else 0)


def test_an_engine_does_only_what_its_role_says() -> None:
    prefill, decode = side(is_consumer=False), side(is_producer=False)
    received, sent = request("r", receive_params("t")), request("s", send_params("t"))
    assert prefill.num_new_matched_tokens(received, 0) == (0, False)
    prefill.allocated(received, blocks(range(7)), 0)
    assert prefill.build_plan(step()).placements == []
    decode.allocated(sent, blocks(range(7)), 0)
    assert decode.build_plan(step(new={"s": (range(7), 0, 100)})).parts == []


def test_a_prefill_in_chunks_is_sent_in_parts() -> None:
    scheduler = side()
    sent = request("r", send_params("t"))
    assert scheduler.num_new_matched_tokens(sent, 0) == (0, False)
    scheduler.allocated(sent, blocks(range(3)), 0)
    plans = [
        scheduler.build_plan(step(new={"r": (range(3), 0, 40)})),
        scheduler.build_plan(step(cached={"r": ([3, 4, 5, 6], 40, 60)})),
        scheduler.build_plan(step(cached={"r": (None, 100, 1)})),
    ]
    assert [[part.tokens for part in plan.parts] for plan in plans] == [[(0, 40)], [(40, 99)], []]
    assert scheduler.finished(sent)
    assert scheduler.has_pending_push_work
    scheduler.reported(finished(sending=["r"]))
    assert not scheduler.has_pending_push_work


@pytest.mark.parametrize("resumed_as_new", [True, False])
def test_a_preempted_prefill_is_sent_again(resumed_as_new: bool) -> None:
    scheduler = side()
    scheduler.allocated(request("r", send_params("t")), blocks(range(3)), 0)
    scheduler.build_plan(step(new={"r": (range(3), 0, 40)}))
    assert [one.attempt for one in scheduler.build_plan(step(preempted=["r"])).starts] == [2]
    again = {"r": (range(20, 27), 16, 84)}
    plan = scheduler.build_plan(
        step(new=again) if resumed_as_new else step(cached=again, resumed=["r"])
    )
    assert plan.starts == []
    assert [part.tokens for part in plan.parts] == [(0, 99)]
    assert plan.parts[0].tables[0].block_ids[0] == 20


def test_an_aborted_decode_request_is_given_up() -> None:
    scheduler = side()
    asked = request("r", receive_params("t"), status="FINISHED_ABORTED")
    scheduler.allocated(asked, blocks(range(7)), 99)
    assert not scheduler.finished(asked)  # vLLM itself keeps the blocks until it is reported
    assert [one.transfer_id for one in scheduler.build_plan(step()).given_up] == ["t"]


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_an_aborted_prefill_is_cancelled(status: str) -> None:
    scheduler = side()
    sent = request("r", send_params("t"), status=status)
    scheduler.allocated(sent, blocks(range(7)), 0)
    scheduler.build_plan(step(new={"r": (range(7), 0, 100)}))
    assert scheduler.finished(sent)
    assert scheduler.build_plan(step()).cancelled == ["r"]
