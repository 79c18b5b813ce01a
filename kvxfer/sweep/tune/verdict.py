"""When one way of copying is faster than another, and when that is noise.

In each repeat the default is measured twice and the candidate once, in turns, so that all three
share what else the machine did. The candidate is faster where **every** repeat says so, and the
median of the repeats by **more than the noise**: the median of what the two runs of the default
differ by, and at least 3 %.

Why both. A slow second spoils one repeat, not all of them; of equal ways all of R repeats agree
once in 2^R by chance, for either side. With few repeats that is often, so the size must count too:
what the default differs by from itself is no gain. Medians, because one repeat in which something
else took the CPUs says nothing of either. 3 % is below what anybody would notice, and above what
two runs differ by on a quiet machine.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from kvxfer.sweep.stats import median

MIN_GAIN = 0.03

Word = Literal["gain", "same", "slower"]


class Repeats(NamedTuple):
    """Times of as many repeats each, in the order in which they were taken.

    Attributes:
        default_us: the default's.
        again_us: the default's once more.
        candidate_us: the candidate's.
    """

    default_us: Sequence[float]
    again_us: Sequence[float]
    candidate_us: Sequence[float]


class Verdict(NamedTuple):
    """What the repeats say of a candidate.

    Attributes:
        word: ``gain``, ``same`` or ``slower``.
        gain: 0.25 = a quarter less time; the median of the repeats.
        noise: what is no difference.
    """

    word: Word
    gain: float
    noise: float


def judge(repeats: Repeats) -> Verdict:
    """Compare the candidate with the default."""
    default, again, candidate = (np.log(np.asarray(times)) for times in repeats)
    gains = 1.0 - np.exp(candidate - (default + again) / 2)
    gain = median(gains.tolist())
    noise = max(MIN_GAIN, median(np.expm1(np.abs(again - default)).tolist()))
    if gain > noise and bool((gains > 0).all()):
        return Verdict("gain", gain, noise)
    if -gain > noise and bool((gains < 0).all()):
        return Verdict("slower", gain, noise)
    return Verdict("same", gain, noise)


def judge_together(points: Sequence[Repeats]) -> Verdict:
    """Compare over several points, with as many repeats each, by their geometric means."""
    means = (
        np.exp(np.log(np.asarray(times)).mean(axis=0)).tolist()
        for times in zip(*points, strict=True)
    )
    return judge(Repeats(*means))
