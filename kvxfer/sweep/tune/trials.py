"""Times of the default, twice, and of candidates at the same points, taken in turns."""

from collections import defaultdict
from typing import NamedTuple

from kvxfer.sweep.result import SweepResult
from kvxfer.sweep.tune.verdict import Repeats

DEFAULT = "default"


def again_of(name: str) -> str:
    """The name of its second measurement in a repeat."""
    return f"{name} again"


AGAIN = again_of(DEFAULT)


class Point(NamedTuple):
    """A size that was measured; what a rule is found by, and between how many processes.

    Attributes:
        op: put or get.
        run_bytes: of the plan's runs.
        total_bytes: of one plan: of ranks, what one moves to one other.
    """

    op: str
    run_bytes: int
    total_bytes: int
    src_tp: int = 1
    dst_tp: int = 1

    @property
    def sizes(self) -> tuple[int, int]:
        """Run bytes and total bytes."""
        return self.run_bytes, self.total_bytes


def point_of(result: SweepResult) -> Point:
    """The point of a row."""
    num_plans = max(result.src_tp, result.dst_tp)
    return Point(
        result.op,
        result.page_bytes if result.run_bytes is None else result.run_bytes,
        result.total_bytes // num_plans,
        result.src_tp,
        result.dst_tp,
    )


class Trials:
    """Median latencies of repeats, in microseconds, by candidate and point."""

    def __init__(self) -> None:
        self._times_us: dict[tuple[str, Point], list[float]] = defaultdict(list)

    def add(self, name: str, result: SweepResult) -> None:
        """One repeat of a candidate, of ``DEFAULT`` or of ``AGAIN``."""
        self._times_us[name, point_of(result)].append(result.latency_us.p50)

    @property
    def points(self) -> list[Point]:
        """All points of the default, in the order in which they were measured first."""
        return self.points_of(DEFAULT)

    def points_of(self, name: str) -> list[Point]:
        """Likewise of a candidate."""
        return [point for own, point in self._times_us if own == name]

    def repeats(
        self, name: str, point: Point, *, default: str = DEFAULT, again: str = AGAIN
    ) -> Repeats | None:
        """What to judge a candidate by at a point; None unless it was measured in all repeats."""
        times = [self._times_us.get((one, point), []) for one in (default, again, name)]
        if len({len(one) for one in times}) != 1 or not times[0]:
            return None
        return Repeats(*times)
