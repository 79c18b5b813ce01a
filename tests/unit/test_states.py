"""The tables of a session, walked from end to end; and the same walk over tables with a hole."""

from collections.abc import Callable
from dataclasses import fields, replace
from enum import Enum
from typing import Any

import pytest

from kvxfer.session.delivery import Delivery
from kvxfer.session.request_book import RequestBook
from kvxfer.session.state_machine import Machine, Step, Table
from kvxfer.session.states import (
    RECEIVE_TABLE,
    SEND_TABLE,
    ReceiveEvent,
    ReceiveLimits,
    Receiving,
    SendEvent,
    Sending,
    SendLimits,
)

TABLES: list[tuple[Table[Any, Any], type[Enum], type[Enum], type, type]] = [
    (RECEIVE_TABLE, Receiving, ReceiveEvent, ReceiveLimits, RequestBook),
    (SEND_TABLE, Sending, SendEvent, SendLimits, Delivery),
]
names = ["receive", "send"]


def holes(
    table: Table[Any, Any], states: type[Enum], events: type[Enum], limits: type, actor: type
) -> list[str]:
    """What a table lacks."""
    found = []
    known = {field.name for field in fields(limits)}
    for state in states:
        row = table.steps.get(state, {})
        found += [f"{state} does not say what {event} does" for event in events if event not in row]
        terminal = not any(row.values())
        if terminal == (state in table.limits):
            found.append(f"{state} has a deadline and an end, or neither")
        if not terminal and row.get(table.late) is None:
            found.append(f"{state} stays when it is late")
        for step in filter(None, row.values()):
            if step.action and not hasattr(actor, f"_on_{step.action}"):
                found.append(f"nobody does {step.action}")
    found += [f"no limit {name}" for name in table.limits.values() if name not in known]
    reached = {table.start}
    while True:
        further = {step.to for one in reached for step in table.steps.get(one, {}).values() if step}
        if further <= reached:
            break
        reached |= further
    found += [f"{state} is never reached" for state in states if state not in reached]
    return found


@pytest.mark.parametrize("case", TABLES, ids=names)
def test_a_table_is_complete(case: Any) -> None:
    assert holes(*case) == []


@pytest.mark.parametrize("case", TABLES, ids=names)
def test_lateness_alone_leads_to_an_end_from_everywhere(case: Any) -> None:
    table, states, *_ = case
    for state in states:
        seen = []
        while (step := table.steps[state][table.late]) is not None:
            assert state not in seen, f"{state} is late for ever"
            seen.append(state)
            state = step.to
        assert state not in table.limits


def without_event(table: Table[Any, Any]) -> Table[Any, Any]:
    state = table.start
    row = dict(table.steps[state])
    row.popitem()
    return replace(table, steps={**table.steps, state: row})


def without_deadline(table: Table[Any, Any]) -> Table[Any, Any]:
    return replace(table, limits={k: v for k, v in table.limits.items() if k != table.start})


def with_unknown_limit(table: Table[Any, Any]) -> Table[Any, Any]:
    return replace(table, limits={**table.limits, table.start: "patience_s"})


def late_for_nothing(table: Table[Any, Any]) -> Table[Any, Any]:
    row = {**table.steps[table.start], table.late: None}
    return replace(table, steps={**table.steps, table.start: row})


def with_idle_action(table: Table[Any, Any]) -> Table[Any, Any]:
    row = {**table.steps[table.start], table.late: Step(table.start, "dream")}
    return replace(table, steps={**table.steps, table.start: row})


def unreachable(table: Table[Any, Any]) -> Table[Any, Any]:
    steps = {
        state: {event: step and replace(step, to=table.start) for event, step in row.items()}
        for state, row in table.steps.items()
    }
    return replace(table, steps=steps)


@pytest.mark.parametrize("case", TABLES, ids=names)
@pytest.mark.parametrize(
    "spoil",
    [
        without_event,
        without_deadline,
        with_unknown_limit,
        late_for_nothing,
        with_idle_action,
        unreachable,
    ],
)
def test_the_walk_sees_a_hole(
    case: Any, spoil: Callable[[Table[Any, Any]], Table[Any, Any]]
) -> None:
    table, *rest = case
    assert holes(spoil(table), *rest)


def test_a_machine_follows_its_table() -> None:
    machine = Machine(RECEIVE_TABLE, ReceiveLimits(wait_s=0.0))
    assert machine.is_late(machine.end_s)
    assert machine.feed(ReceiveEvent.COVERED) == ""
    assert (machine.state, machine.serial) == (Receiving.WAITING, 0)
    assert machine.feed(ReceiveEvent.GRANT) == "start"
    assert machine.feed(ReceiveEvent.LATE) == "drain"
    assert machine.feed(ReceiveEvent.DRAINED) == "fail"
    assert (machine.state, machine.serial) == (Receiving.FAILED, 3)
    assert machine.end_s == float("inf")
    for event in ReceiveEvent:
        assert machine.feed(event) == ""
    assert machine.state is Receiving.FAILED
