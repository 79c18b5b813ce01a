"""Which figures differ from the others of their node: no table of parts is needed for that."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

from kvxfer.diagnose.expected import OUTLIER_DEVIATIONS, OUTLIER_FRACTION
from kvxfer.diagnose.figures import EVERY, Figure

# Makes the median absolute deviation of normally distributed values their standard deviation.
_MAD_SCALE = 1.4826


def is_far_below(value: float, others: Sequence[float]) -> bool:
    """Whether a value lies below the others by more than they scatter.

    Judged by their median and median absolute deviation, so that one outlier among the others does
    not hide the next (Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993).
    """
    if not others:
        return False
    middle = median(others)
    deviation = _MAD_SCALE * median([abs(one - middle) for one in others])
    return middle - value > max(OUTLIER_DEVIATIONS * deviation, OUTLIER_FRACTION * abs(middle))


def slow_ones(figures: Sequence[Figure]) -> list[tuple[Figure, float]]:
    """Rates far below those of the others, each with the median of the others."""
    rates = [(figure, figure.gb_per_s) for figure in figures if figure.gb_per_s is not None]
    found = []
    for position, (figure, rate) in enumerate(rates):
        others = [other for index, (_, other) in enumerate(rates) if index != position]
        if is_far_below(rate, others):
            found.append((figure, median(others)))
    return found


def late_ones(figures: Sequence[Figure]) -> list[tuple[Figure, float]]:
    """Latencies far above those of the others, each with the median of the others."""
    known = [(figure, figure.latency_ns) for figure in figures if figure.latency_ns is not None]
    found = []
    for position, (figure, latency) in enumerate(known):
        others = [other for index, (_, other) in enumerate(known) if index != position]
        if is_far_below(-latency, [-other for other in others]):
            found.append((figure, median(others)))
    return found


def common_end(slow: Sequence[Figure], of: Sequence[Figure]) -> str:
    """The one device that all slow figures share, where they are most of what it takes part in."""
    ends = Counter(end for figure in slow for end in (figure.src, figure.dst) if end != EVERY)
    if not ends or len(slow) < 2:
        return ""
    end, count = ends.most_common(1)[0]
    part = sum(end in (figure.src, figure.dst) for figure in of)
    return end if count == len(slow) and 2 * count > part else ""
