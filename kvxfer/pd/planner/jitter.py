"""How gaps scatter around the steps that they are of."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvxfer.pd.planner.engine_model import StepModel
from kvxfer.pd.planner.times import Floats, Times

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Jitter:
    """Quantiles of equal weight of measured by predicted time; none: a step takes just its time.

    Args:
        shared: of steps of several sequences.
        alone: of steps of one.
    """

    shared: Floats
    alone: Floats

    @classmethod
    def of(cls, steps: StepModel) -> "Jitter":
        """An engine's."""
        return cls(np.array(steps.jitter), np.array(steps.jitter_alone or steps.jitter))

    def spread(self, values_s: Floats, counts: Floats, is_alone: Bools) -> Times:
        """Every value spread over its quantiles."""
        parts = [
            _spread(values_s[which], counts[which], quantiles)
            for which, quantiles in ((~is_alone, self.shared), (is_alone, self.alone))
        ]
        spread_s, spread_counts = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return Times.of(spread_s, spread_counts)

    def drawn(self, gaps_s: Floats, is_alone: Bools, seed: int) -> Floats:
        """One draw for each gap, the same for the same seed."""
        rng = np.random.default_rng(seed)
        found: Floats = gaps_s.copy()
        for which, quantiles in ((~is_alone, self.shared), (is_alone, self.alone)):
            if len(quantiles):
                found[which] *= rng.choice(quantiles, int(which.sum()))
        return found


def _spread(values_s: Floats, counts: Floats, quantiles: Floats) -> tuple[Floats, Floats]:
    if not len(quantiles):
        return values_s, counts
    spread_s: Floats = np.outer(values_s, quantiles).ravel()
    return spread_s, np.repeat(counts / len(quantiles), len(quantiles))
