"""A state machine that is a table: every state, every event and every deadline is written down."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)


@dataclass(frozen=True, slots=True)
class Step(Generic[StateT]):
    """Where an event leads, and the name of what is done on the way."""

    to: StateT
    action: str = ""


@dataclass(frozen=True, slots=True)
class Table(Generic[StateT, EventT]):
    """All that a machine can do.

    Attributes:
        start: the first state.
        late: the event at the end of a state's time.
        limits: for each state that is not terminal the name of its time limit.
        steps: for each state what each event leads to; None = it changes nothing.
    """

    start: StateT
    late: EventT
    limits: Mapping[StateT, str]
    steps: Mapping[StateT, Mapping[EventT, Step[StateT] | None]]


class Machine(Generic[StateT, EventT]):
    """One run through a table.

    Attributes:
        state: where it is.
        serial: grows with every step, so that an answer to an earlier question can be told.
        end_s: when the time of the state is over (time.monotonic()); infinity in a terminal one.
    """

    def __init__(self, table: Table[StateT, EventT], limits: object) -> None:
        """In the first state; ``limits`` has the time limits of the table as attributes."""
        self._table = table
        self._limits = limits
        self.serial = 0
        self._enter(table.start)

    def feed(self, event: EventT) -> str:
        """Take a step; returns the name of its action, empty where there is none."""
        step = self._table.steps[self.state][event]
        if step is None:
            return ""
        self.serial += 1
        self._enter(step.to)
        return step.action

    def is_late(self, now_s: float) -> bool:
        """Whether the time of the state is over."""
        return now_s >= self.end_s

    def _enter(self, state: StateT) -> None:
        self.state = state
        limit = self._table.limits.get(state)
        self.end_s = float("inf")
        if limit is not None:
            self.end_s = time.monotonic() + float(getattr(self._limits, limit))
