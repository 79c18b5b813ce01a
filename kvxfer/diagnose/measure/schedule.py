"""One run of measurements: seeds, rounds, the time that is left, and what is said meanwhile."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from kvxfer.diagnose.figures import Figure
from kvxfer.diagnose.measure.events import Begun, Event, Measured, Skipped
from kvxfer.diagnose.measure.node import Wrong
from kvxfer.errors import KvxferError, NotAvailable
from kvxfer.units import gb_per_s

# A round takes about so long at most, however slow the path: 56 pairs of eight GPUs on PCIe, six
# rounds of three kinds each, are to fit in half a minute.
ROUND_S = 0.02


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

    def measure(
        self, key: tuple[str, str, str], one_round: Callable[[], tuple[int, float, Wrong]]
    ) -> None:
        """Time rounds, each of bytes, seconds and what the check found, and tell the figure.

        The first round is not timed. A failure becomes a figure with an error.
        """
        kind, src, dst = key
        self.emit(Begun(kind, src, dst))
        rates: list[float] = []
        wrong, num_bytes = Wrong(0), 0
        try:
            for index in range(self.rounds + 1):
                num_bytes, seconds, found = one_round()
                if index or found.num_words:
                    rates.append(gb_per_s(num_bytes, seconds))
                wrong = Wrong(wrong.num_words + found.num_words, wrong.first or found.first)
        except NotAvailable as error:
            self.emit(Skipped(f"{kind} {src} -> {dst}", str(error)))
            return
        except KvxferError as error:
            self.emit(Measured(Figure(kind=kind, src=src, dst=dst, error=str(error))))
            return
        figure = Figure(
            kind=kind,
            src=src,
            dst=dst,
            gb_per_s=median(rates),
            best_gb_per_s=max(rates),
            num_bytes=num_bytes,
            rounds=len(rates),
            num_wrong=wrong.num_words,
            first_wrong=wrong.first,
        )
        self.emit(Measured(figure))
