"""The decode side in the scheduler: who receives what, once."""

from kvxfer.connectors.vllm.receive_tracker import ReceiveTracker
from kvxfer.connectors.vllm.step import StepPlan, Table

TABLES = (Table((4, 5), 0),)


def taken(tracker: ReceiveTracker) -> StepPlan:
    plan = StepPlan()
    tracker.take(plan)
    return plan


def test_all_but_the_last_token_comes() -> None:
    tracker = ReceiveTracker()
    assert tracker.num_to_receive("r", "t", 100, 0) == 99
    assert tracker.num_to_receive("r", "t", 100, 64) == 35
    assert tracker.num_to_receive("r", "t", 1, 0) == 0


def test_asking_changes_nothing() -> None:
    tracker = ReceiveTracker()
    answers = {tracker.num_to_receive(name, "t", 100, 0) for name in ("a", "b", "a") for _ in "12"}
    assert answers == {99}
    assert taken(tracker) == StepPlan()


def test_a_request_is_placed_once() -> None:
    tracker = ReceiveTracker()
    tracker.place("r", "t", 100, 99, TABLES)
    tracker.place("r", "t", 100, 0, TABLES)  # once its KV is there
    (placement,) = taken(tracker).placements
    assert (placement.request_id, placement.num_tokens, placement.awaited) == ("r", 99, True)
    assert placement.tables == TABLES
    assert taken(tracker).placements == []


def test_what_arrived_is_not_received_again() -> None:
    tracker = ReceiveTracker()
    tracker.place("r", "t", 100, 99, TABLES)
    tracker.arrived(["r", "other"])
    assert tracker.num_to_receive("r", "t", 100, 0) == 0  # preempted later on
    tracker.place("r", "t", 100, 0, TABLES)
    assert len(taken(tracker).placements) == 1


def test_other_requests_of_a_transfer_wait_for_its_end() -> None:
    tracker = ReceiveTracker()
    tracker.place("0_r", "t", 100, 99, TABLES)
    assert tracker.num_to_receive("1_r", "t", 100, 0) is None
    assert tracker.num_to_receive("0_r", "t", 100, 0) == 99
    tracker.arrived(["0_r"])
    assert tracker.num_to_receive("1_r", "t", 100, 64) == 0


def test_a_request_that_needs_nothing_takes_the_offer_without_waiting() -> None:
    tracker = ReceiveTracker()
    tracker.place("r", "t", 129, 0, TABLES)
    (placement,) = taken(tracker).placements
    assert (placement.tables, placement.awaited) == ((), False)
    tracker.finished("r", "t", "over")
    assert taken(tracker).given_up == []


def test_of_one_token_nothing_is_said() -> None:
    tracker = ReceiveTracker()
    tracker.place("r", "t", 1, 0, TABLES)
    assert taken(tracker) == StepPlan()


def test_a_request_that_ends_before_its_kv_is_given_up() -> None:
    tracker = ReceiveTracker()
    tracker.place("r", "t", 100, 99, TABLES)
    tracker.finished("r", "t", "aborted")
    (given_up,) = taken(tracker).given_up
    assert (given_up.transfer_id, given_up.reason) == ("t", "aborted")
    assert tracker.num_to_receive("other", "t", 100, 0) is None  # its blocks may still be written
    tracker.arrived(["r"])
    assert tracker.num_to_receive("other", "t", 100, 0) == 0


def test_a_request_that_never_had_blocks_is_given_up_at_once() -> None:
    tracker = ReceiveTracker()
    tracker.finished("r", "t", "aborted")
    assert [one.transfer_id for one in taken(tracker).given_up] == ["t"]
    assert tracker.num_to_receive("sibling", "t", 100, 0) == 0


def test_the_end_of_a_sibling_changes_nothing() -> None:
    tracker = ReceiveTracker()
    tracker.place("0_r", "t", 100, 99, TABLES)
    tracker.finished("1_r", "t", "aborted")
    assert taken(tracker).given_up == []
    assert tracker.num_to_receive("0_r", "t", 100, 0) == 99
