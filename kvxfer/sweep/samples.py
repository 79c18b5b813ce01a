"""The times of a case's rounds, and the figures made of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kvxfer.errors import VerificationError
from kvxfer.sweep.result import Latency, Rate
from kvxfer.sweep.stats import median, percentile
from kvxfer.units import gb_per_s

_ABOVE_LIMIT = 1.03
# Rounds by the size of a request: enough for a p99 where a round is short.
_ITERS_BY_BYTES = ((1 << 20, 500), (64 << 20, 100))
_ITERS_LARGE = 20
_Extra = TypeVar("_Extra")


@dataclass(slots=True)
class Samples:
    """Times of rounds that moved ``num_bytes`` each."""

    num_bytes: int
    latency_us: list[float] = field(default_factory=list)
    plan_us: list[float] = field(default_factory=list)
    post_us: list[float] = field(default_factory=list)
    limit_us: list[float] = field(default_factory=list)
    actual_path: str = ""
    num_sms: int = 0
    busy_s: float | None = None  # wall time of transfers without a pause between them

    @property
    def rates(self) -> Rate:
        """GB/s of the rounds, or of the busy time where there is one."""
        if self.busy_s is not None:
            rate = gb_per_s(self.num_bytes * len(self.latency_us), self.busy_s)
            return Rate(rate, rate, rate)
        rates = [gb_per_s(self.num_bytes, value / 1e6) for value in self.latency_us]
        return Rate(median(rates), min(rates), max(rates))

    @property
    def latencies(self) -> Latency:
        """Percentiles."""
        return Latency(*(percentile(self.latency_us, q) for q in (50, 90, 99)))

    @property
    def limit_gb_per_s(self) -> float:
        """The median contiguous copy."""
        return gb_per_s(self.num_bytes, median(self.limit_us) / 1e6)

    @property
    def fraction(self) -> float:
        """Median rate / limit."""
        return self.rates.p50 / self.limit_gb_per_s


def default_iters(total_bytes: int) -> int:
    """Timed rounds for a request of this size."""
    for limit_bytes, iters in _ITERS_BY_BYTES:
        if total_bytes < limit_bytes:
            return iters
    return _ITERS_LARGE


def measure_within_limit(
    measure: Callable[[], tuple[Samples, _Extra]],
) -> tuple[Samples, _Extra, list[str]]:
    """Measure, and once more where the contiguous copy was beaten; a note where that holds."""
    samples, extra = measure()
    if samples.fraction <= _ABOVE_LIMIT:
        return samples, extra, []
    samples, extra = measure()
    if samples.fraction <= _ABOVE_LIMIT:
        return samples, extra, []
    note = f"{samples.fraction:.2f} of the contiguous copy, measured twice, interleaved"
    return samples, extra, [note]


def require_possible(fastest: float, contiguous: float, limit: float | None) -> None:
    """Refuse a figure that the hardware cannot have done.

    Args:
        fastest: the fastest round, GB/s.
        contiguous: the measured limit, GB/s.
        limit: the physical limit, GB/s; None = unknown.

    Raises:
        VerificationError: one of the two is above the physical limit.
    """
    if limit is not None and max(fastest, contiguous) > limit:
        raise VerificationError(
            f"{fastest:.1f} GB/s (contiguous {contiguous:.1f}) is above the physical limit of "
            f"{limit:.1f} GB/s: the measurement is wrong, do not use it"
        )
