"""Percentiles of samples."""

from collections.abc import Sequence

import numpy as np


def percentile(samples: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0..100), linear between the two nearest samples."""
    return float(np.percentile(np.asarray(samples, dtype=np.float64), q))


def median(samples: Sequence[float]) -> float:
    """The 50th percentile."""
    return percentile(samples, 50)
