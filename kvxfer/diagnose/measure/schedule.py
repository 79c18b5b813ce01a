"""One run of measurements: seeds, rounds, the time that is left, and what is said meanwhile."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from kvxfer.diagnose.figures import Figure
from kvxfer.diagnose.measure.events import Begun, Event, Measured, Skipped
from kvxfer.diagnose.measure.node import Wrong
from kvxfer.errors import KvxferError, NotAvailable
from kvxfer.units import gb_per_s

# A round takes about so long at most, however slow the path: 56 pairs of eight GPUs on PCIe, six
# rounds of three kinds each, are to fit in half a minute.
ROUND_S = 0.02
Key: TypeAlias = tuple[str, str, str]
# Bytes, seconds, and what the check found.
OneRound: TypeAlias = Callable[[], tuple[int, float, Wrong]]


@dataclass(slots=True)
class _Rounds:
    """The rounds of one figure so far; the first is not timed."""

    key: Key
    one_round: OneRound
    rates: list[float] = field(default_factory=list)
    wrong: Wrong = field(default=Wrong(0))
    num_bytes: int = 0
    has_begun: bool = False

    def run(self) -> None:
        """One more."""
        self.num_bytes, seconds, found = self.one_round()
        if self.has_begun or found.num_words:
            self.rates.append(gb_per_s(self.num_bytes, seconds))
        self.has_begun = True
        num_words = self.wrong.num_words + found.num_words
        self.wrong = Wrong(num_words, self.wrong.first or found.first)

    def figure(self) -> Figure:
        """What they come to."""
        kind, src, dst = self.key
        return Figure(
            kind=kind,
            src=src,
            dst=dst,
            gb_per_s=median(self.rates),
            best_gb_per_s=max(self.rates),
            num_bytes=self.num_bytes,
            rounds=len(self.rates),
            num_wrong=self.wrong.num_words,
            first_wrong=self.wrong.first,
        )


@dataclass(slots=True)
class Schedule:
    """What all measurements share.

    Attributes:
        emit: is told every event.
        rounds: timed for each figure.
        deadline_s: on the monotonic clock; nothing begins after it.
    """

    emit: Callable[[Event], None]
    rounds: int
    deadline_s: float
    _seed: int = field(default=0)

    def next_seed(self) -> int:
        """One that no round has had: what an earlier round left cannot pass for this one's."""
        self._seed += 1
        return self._seed

    def has_time(self, what: str) -> bool:
        """Whether something may begin; says so where it may not."""
        if time.monotonic() < self.deadline_s:
            return True
        self.emit(Skipped(what, "no time was left for it"))
        return False

    def measure(self, key: Key, one_round: OneRound) -> None:
        """Time rounds of one figure and tell it. A failure becomes a figure with an error."""
        self.measure_in_turn({key: one_round})

    def measure_in_turn(
        self,
        figures: Mapping[Key, OneRound],
        *,
        is_enough: Callable[[Mapping[Key, float]], bool] = lambda best: True,
        extra_s: float = 0.0,
    ) -> None:
        """Time figures that are compared with each other, a round of each after the other.

        What slows the machine for a while then slows all of them, and not the one alone that was
        measured meanwhile.

        Args:
            figures: key -> a round of it.
            is_enough: whether the best rates (GB/s) so far tell; else there are more rounds.
            extra_s: seconds that more rounds may take; they also end with the schedule.
        """
        going = [_Rounds(key, one_round) for key, one_round in figures.items()]
        for _ in range(self.rounds + 1):
            going = [one for one in going if self._runs(one)]
        end_s = min(time.monotonic() + extra_s, self.deadline_s)
        while going and time.monotonic() < end_s:
            if is_enough({one.key: max(one.rates) for one in going}):
                break
            going = [one for one in going if self._runs(one)]
        for one in going:
            self.emit(Measured(one.figure()))

    def _runs(self, rounds: _Rounds) -> bool:
        """Run one more round; False, and told, where it cannot be."""
        kind, src, dst = rounds.key
        self.emit(Begun(kind, src, dst))
        try:
            rounds.run()
        except NotAvailable as error:
            self.emit(Skipped(f"{kind} {src} -> {dst}", str(error)))
            return False
        except KvxferError as error:
            self.emit(Measured(Figure(kind=kind, src=src, dst=dst, error=str(error))))
            return False
        return True
