"""Samples of times, in which one value may stand for many."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvxfer.pd.summary import Distribution

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Times:
    """A sample of times: ``values_s`` ascending, float64, and how often each is there."""

    values_s: Floats
    counts: Floats

    @classmethod
    def of(cls, values_s: Floats, counts: Floats) -> "Times":
        """A sample of values in any order, those that are there not at all left out."""
        kept = np.flatnonzero(counts > 0)
        order = kept[np.argsort(values_s[kept], kind="stable")]
        return cls(values_s[order], counts[order])

    @property
    def num_samples(self) -> float:
        """How many there are."""
        return float(self.counts.sum())

    def percentile_s(self, percent: float) -> float:
        """The smallest value that ``percent`` of the sample do not exceed; NaN of none."""
        if not len(self.values_s):
            return float("nan")
        below = np.cumsum(self.counts)
        at = int(np.searchsorted(below, below[-1] * percent / 100.0 * (1 - 1e-12)))
        return float(self.values_s[min(at, len(below) - 1)])

    def share_above(self, limit_s: float) -> float:
        """Share of the sample above the limit, 0 to 1; NaN of none."""
        total = self.num_samples
        above = self.counts[np.searchsorted(self.values_s, limit_s, side="right") :].sum()
        return float(above) / total if total else float("nan")

    def distribution(self, most: int = 1_000_000) -> Distribution:
        """The same in milliseconds, a value a sample, thinned evenly to ``most`` at the most."""
        below = np.cumsum(self.counts)
        if not len(below):
            return Distribution(np.empty(0))
        num = min(most, max(1, round(float(below[-1]))))
        places = (np.arange(num) + 0.5) / num * below[-1]
        return Distribution(self.values_s[np.searchsorted(below, places)] * 1e3)
