"""Short requests that stream while now and then a long prompt comes: the load, and who it holds up.

The case of TNG's "How Long Prompts Block Other Requests". Short requests come evenly; in the middle
of each period one long prompt comes too. It *is served* from its sending to its first token.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvxfer.errors import InvalidUsage
from kvxfer.pd.analysis.replies import Reply
from kvxfer.pd.planner.trace import Trace
from kvxfer.pd.summary import Distribution, Floats

_HASH_TOKENS: Final = 16  # that a hash id of vLLM's traces stands for
_LEAST_TOKENS: Final = _HASH_TOKENS + 1  # with one id a trace would look like one of 512 a hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocking:
    """The load.

    Args:
        short, long: tokens in.
        osl: tokens out, of all.
        requests_per_s: short ones.
        period_s: from one long prompt to the next.
        num_periods: how many there are.

    Raises:
        InvalidUsage: a number is out of range.
    """

    short: int
    long: int
    osl: int
    requests_per_s: float
    period_s: float
    num_periods: int

    def __post_init__(self) -> None:
        if not _LEAST_TOKENS <= self.short < self.long:
            raise InvalidUsage(
                f"short prompts of {self.short} tokens, long ones of {self.long}; give two --isl, "
                f"the shorter of {_LEAST_TOKENS} tokens or more"
            )
        num_short = self.requests_per_s * self.period_s
        if self.osl < 2 or self.num_periods < 1 or not 1.0 <= num_short <= 1e5:
            raise InvalidUsage(
                f"{self.num_periods} long prompts, {num_short:g} short ones beside each, "
                f"{self.osl} tokens out; use 1 or more, 1 to 100,000, and 2 or more"
            )

    @property
    def threshold(self) -> int:
        """A prompt above so many tokens is a long one."""
        return (self.short + self.long) // 2

    def write(self, path: Path) -> Path:
        """Write it as a trace of vLLM's kind (JSONL); no two prompts share a token block.

        Raises:
            InvalidUsage: the file cannot be written.
        """
        num_short = round(self.requests_per_s * self.period_s)
        arrivals = [
            (period * self.period_s + at / self.requests_per_s, self.short)
            for period in range(self.num_periods)
            for at in range(num_short)
        ]
        # Half a step off, so that no short prompt comes at the very same time.
        middle_s = (num_short // 2 + 0.5) / self.requests_per_s
        arrivals += [
            (period * self.period_s + middle_s, self.long) for period in range(self.num_periods)
        ]
        lines, next_id = [], 0
        for at_s, tokens in sorted(arrivals):
            num_ids = -(-tokens // _HASH_TOKENS)
            line = {
                "timestamp": round(at_s, 4),
                "input_length": tokens,
                "output_length": self.osl,
                "hash_ids": [*range(next_id, next_id + num_ids)],
            }
            lines.append(json.dumps(line) + "\n")
            next_id += num_ids
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise InvalidUsage(f"cannot write {path}: {error.strerror}") from error
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Who was held up, in milliseconds.

    Args:
        ttft: of short requests that came while a long prompt was served.
        calm_ttft: of the others.
        gaps: of short requests that streamed, those that overlap the serving of a long prompt.
        calm_gaps: the others.
        long_ttft: of long prompts.
    """

    ttft: Distribution
    calm_ttft: Distribution
    gaps: Distribution
    calm_gaps: Distribution
    long_ttft: Distribution


def held_up(
    replies: Sequence[Reply], sent_s: Mapping[int, float], trace: Trace, threshold: int
) -> Held:
    """Sort TTFT and gaps by whether a long prompt was served at the time.

    Args:
        replies: of the trace's requests, ``Reply.index`` their places in it.
        sent_s: when each was sent, on any clock.
        threshold: prompts of more tokens are long.
    """
    is_long = [one.num_prompt_tokens > threshold for one in trace.requests]
    longs = [reply for reply in replies if is_long[reply.index]]
    starts_ms = np.array([sent_s[reply.index] * 1e3 for reply in longs])
    ends_ms = starts_ms + np.array([reply.ttft_ms for reply in longs])

    def overlaps(from_ms: Floats, to_ms: Floats) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        found = (from_ms[:, None] < ends_ms) & (to_ms[:, None] > starts_ms)
        overlap: np.ndarray[tuple[int], np.dtype[np.bool_]] = found.any(axis=1)
        return overlap

    shorts = [reply for reply in replies if not is_long[reply.index]]
    came_ms = np.array([sent_s[reply.index] * 1e3 for reply in shorts])
    ttft_ms = np.array([reply.ttft_ms for reply in shorts])
    during = overlaps(came_ms, came_ms)
    from_ms, gaps_ms = _gaps(shorts, came_ms)
    stalled = overlaps(from_ms, from_ms + gaps_ms)
    return Held(
        ttft=Distribution.of(ttft_ms[during]),
        calm_ttft=Distribution.of(ttft_ms[~during]),
        gaps=Distribution.of(gaps_ms[stalled]),
        calm_gaps=Distribution.of(gaps_ms[~stalled]),
        long_ttft=Distribution.of(ends_ms - starts_ms),
    )


def _gaps(replies: Sequence[Reply], came_ms: Floats) -> tuple[Floats, Floats]:
    """When each gap of all these begins, and how long it is."""
    starts, gaps = [np.empty(0)], [np.empty(0)]
    for reply, at_ms in zip(replies, came_ms, strict=True):
        before_ms = np.concatenate([[0.0], np.cumsum(reply.gaps_ms)[:-1]])
        starts.append(at_ms + reply.ttft_ms + before_ms[: len(reply.gaps_ms)])
        gaps.append(reply.gaps_ms)
    return np.concatenate(starts), np.concatenate(gaps)
