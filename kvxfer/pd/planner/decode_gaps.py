"""A decode step out of the messages of streams, which a busy machine hands out several at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvxfer.pd.analysis.replies import ONE_READ_MS
from kvxfer.pd.planner.profile_streams import Stream

MOST_JOINED = 0.1
"""Share of gaps of no time above which gaps are of the client's reads, not of the engine's steps.
"""
_ONE_READ_S = ONE_READ_MS * 1e-3
_LEAST_MESSAGES = 3  # a first one, and two reads between which there is a time


@dataclass(frozen=True, slots=True)
class DecodeGaps:
    """What was seen while all streams decoded and none prefilled.

    Args:
        step_s: of a token, the median of the streams' means.
        gaps_s: between one message and the next.
        joined: share of these that are none, 0 to 1: messages that came together.
    """

    step_s: float
    gaps_s: list[float]
    joined: float

    @property
    def are_of_steps(self) -> bool:
        """Whether a gap is one step's, so that their spread means something."""
        return self.joined <= MOST_JOINED


def decode_gaps(streams: Sequence[Stream], num_tokens: int) -> DecodeGaps | None:
    """The step between the last second token and the first last one; None where nothing tells it.

    A stream's step is a time between two reads by the tokens that came with those after the first:
    how many a read brings does not matter. Its first gap is left out; engines hand out two tokens
    at once there.

    Args:
        num_tokens: of each stream; where it has fewer messages, each is taken for several tokens.
    """
    whole = [one for one in streams if len(one.tokens_s) >= _LEAST_MESSAGES]
    if not whole:
        return None
    begin_s = max(one.tokens_s[1] for one in whole)
    end_s = min(one.tokens_s[-1] for one in whole)
    steps_s, gaps_s = [], []
    for one in whole:
        gaps_s += [
            later_s - earlier_s
            for earlier_s, later_s in pairwise(one.tokens_s)
            if begin_s <= earlier_s and later_s <= end_s
        ]
        reads = [read for read in _reads(one.tokens_s[1:]) if begin_s <= read[0] <= end_s]
        if len(reads) > 1:
            num_messages = sum(count for _, count in reads[1:])
            messages_s = (reads[-1][0] - reads[0][0]) / num_messages
            steps_s.append(messages_s * len(one.tokens_s) / num_tokens)
    if not steps_s:
        return None
    joined = np.count_nonzero(np.array(gaps_s) < _ONE_READ_S) / max(1, len(gaps_s))
    return DecodeGaps(float(np.median(steps_s)), gaps_s, float(joined))


def _reads(messages_s: Sequence[float]) -> list[tuple[float, int]]:
    """When messages came, and how many together."""
    found = [(messages_s[0], 1)]
    for earlier_s, later_s in pairwise(messages_s):
        if later_s - earlier_s < _ONE_READ_S:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((later_s, 1))
    return found
