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
        gain: 0.25 = a quarter less time; that of the median repeat, ``1 - candidate / default``.
        noise: what is no difference.
        default_us: the median repeat's time of the default, the geometric mean of its two runs.
        candidate_us: the same repeat's time of the candidate.
    """

    word: Word
    gain: float
    noise: float
    default_us: float
    candidate_us: float


def judge(repeats: Repeats) -> Verdict:
    """Compare the candidate with the default."""
    first, again, candidate = (np.log(np.asarray(times)) for times in repeats)
    default = (first + again) / 2
    gains = 1.0 - np.exp(candidate - default)
    # One of the repeats, of an even number the lower of the two: its times are shown beside it.
    at = int(np.argsort(gains, kind="stable")[(gains.size - 1) // 2])
    gain = float(gains[at])
    noise = max(MIN_GAIN, median(np.expm1(np.abs(again - first)).tolist()))
    word: Word = "same"
    if gain > noise and bool((gains > 0).all()):
        word = "gain"
    elif -gain > noise and bool((gains < 0).all()):
        word = "slower"
    return Verdict(word, gain, noise, float(np.exp(default[at])), float(np.exp(candidate[at])))


def judge_together(points: Sequence[Repeats]) -> Verdict:
    """Compare over several points, with as many repeats each, by their geometric means."""
    means = (
        np.exp(np.log(np.asarray(times)).mean(axis=0)).tolist()
        for times in zip(*points, strict=True)
    )
    return judge(Repeats(*means))
