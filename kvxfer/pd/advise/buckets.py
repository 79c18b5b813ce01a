"""What a Prometheus histogram tells of a percentile: between which two bounds it lies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.errors import ProtocolMismatch
from kvxfer.pd.advise.page import Page


@dataclass(frozen=True, slots=True)
class Between:
    """A value that is above ``low`` and up to ``high``, which is infinite where nothing is known.

    ``estimate``: as if values were spread evenly over the bucket (Prometheus' histogram_quantile);
    of an open bucket its lower bound.
    """

    low: float
    high: float
    estimate: float


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram, or what was counted between two readings of it.

    Args:
        bounds: upper ones, ascending, the last infinite.
        counts: values in each bucket alone, not cumulated.
        total: the sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def count(self) -> float:
        """How many values."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Their mean, exact; NaN of none."""
        return self.total / self.count if self.count else math.nan

    def percentile(self, percent: float) -> Between:
        """The smallest value that ``percent`` of all do not exceed, as far as buckets tell.

        Raises:
            ValueError: there is no value.
        """
        count = self.count
        if not count:
            raise ValueError("a histogram without values has no percentile")
        wanted = max(min(1.0, count), count * percent / 100.0)
        below = 0.0
        low = 0.0
        for bound, in_bucket in zip(self.bounds, self.counts, strict=True):
            if in_bucket and below + in_bucket >= wanted * (1 - 1e-12):
                part = (wanted - below) / in_bucket
                # Rounding must not carry it past its bucket.
                estimate = low if math.isinf(bound) else min(bound, low + (bound - low) * part)
                return Between(low, bound, estimate)
            below += in_bucket
            low = bound
        raise AssertionError("the counts of all buckets are less than their sum")


def buckets_of(page: Page, name: str) -> Buckets | None:
    """A histogram of a page, summed over its labels; None where there is none.

    Raises:
        ProtocolMismatch: its buckets contradict each other, or hold what is no finite number.
    """
    cumulated: dict[float, float] = {}
    for labels, value in page.of(f"{name}_bucket"):
        try:
            bound = float(labels.get("le", ""))
        except ValueError as error:
            raise ProtocolMismatch(f"{name}: a bucket has no bound `le`") from error
        cumulated[bound] = cumulated.get(bound, 0.0) + value
    if not cumulated:
        return None
    bounds = sorted(cumulated)
    counts = _differences([cumulated[bound] for bound in bounds])
    total = page.total(f"{name}_sum")
    if not all(map(math.isfinite, (*bounds[:-1], *counts, total))):
        raise ProtocolMismatch(f"{name}: a bound, a bucket or the sum is no finite number")
    if not math.isinf(bounds[-1]) or min(counts) < 0:
        raise ProtocolMismatch(f"{name}: its buckets do not rise up to +Inf")
    return Buckets(tuple(bounds), counts, total)


def buckets_between(earlier: Page, later: Page, name: str) -> Buckets | None:
    """What a histogram counted between two pages of one process; None where there is none.

    Raises:
        ProtocolMismatch: as `buckets_of`, or its bounds have changed.
    """
    now = buckets_of(later, name)
    then = buckets_of(earlier, name)
    if now is None or then is None:  # a series appears with its first value
        return now
    if now.bounds != then.bounds:
        raise ProtocolMismatch(f"{name}: its bounds changed between two readings; ask again")
    counts = tuple(b - a for a, b in zip(then.counts, now.counts, strict=True))
    return Buckets(now.bounds, counts, now.total - then.total)


def _differences(cumulated: Sequence[float]) -> tuple[float, ...]:
    return tuple(b - a for a, b in zip([0.0, *cumulated], cumulated, strict=False))
