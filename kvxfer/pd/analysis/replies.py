"""The replies of one point, from the client's result: times to tokens, in milliseconds.

vLLM's client takes each message of a stream for a token. In chat completions the first message only
names the role; it is taken out here, so that TTFT and the first gap mean the same for both.
"""

from dataclasses import dataclass

import numpy as np

from kvxfer.pd.summary import Floats
from kvxfer.pd.vllm_json import BenchResult

ONE_READ_MS = 0.1
"""Messages closer than this came in one read of the socket: no step of a model is so short."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One completed request; ``gaps_ms`` float64 [messages - 1], the first gap first."""

    index: int  # in the client's lists
    ttft_ms: float
    e2el_ms: float
    num_tokens: int
    gaps_ms: Floats

    @property
    def tpot_ms(self) -> float | None:
        """(E2EL - TTFT) / (tokens - 1), as vLLM's; None for a reply of one token."""
        if self.num_tokens < 2:
            return None
        return (self.e2el_ms - self.ttft_ms) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Replies:
    """Completed requests in the order sent, and the indices of those that failed."""

    completed: list[Reply]
    failed: list[int]
    without_role: bool  # a message that names the role was taken out of each

    def first_gaps_ms(self) -> Floats:
        """The first gap of each reply that has one."""
        return np.array([one.gaps_ms[0] for one in self.completed if len(one.gaps_ms)])

    def later_gaps_ms(self) -> Floats:
        """All gaps but the first ones, pooled."""
        return np.concatenate([np.empty(0), *(one.gaps_ms[1:] for one in self.completed)])

    def gaps_ms(self) -> Floats:
        """All gaps, pooled."""
        return np.concatenate([np.empty(0), *(one.gaps_ms for one in self.completed)])


def replies_of(result: BenchResult) -> Replies:
    """Sort a result into replies and failures.

    Failed is what has an error, and what has no first message or no token: such a request took no
    0 ms. Where the result has no ``latencies``, a reply ends with its last gap.
    """
    failed = [index for index in range(result.num_requests) if _has_failed(result, index)]
    indices = sorted(set(range(result.num_requests)) - set(failed))
    with_role = _counts_role(result, indices)
    completed = [_reply(result, index, with_role) for index in indices]
    return Replies(completed, failed, with_role)


def _has_failed(result: BenchResult, index: int) -> bool:
    return (
        bool(result.errors[index]) or result.output_lens[index] == 0 or result.ttfts[index] == 0.0
    )


def _counts_role(result: BenchResult, indices: list[int]) -> bool:
    """Whether the client counted a first message without a token, in chat completions.

    It shows as a message too many or, where later messages hold several tokens, as a first gap that
    is none: vLLM sends the role together with the first token.
    """
    streams = [index for index in indices if result.itls[index]]
    if not result.is_chat or not streams:
        return False
    surplus = [len(result.itls[index]) + 1 - result.output_lens[index] for index in streams]
    first_ms = [result.itls[index][0] * 1e3 for index in streams]
    return bool(np.median(surplus) >= 1 or np.median(first_ms) < ONE_READ_MS)


def _reply(result: BenchResult, index: int, with_role: bool) -> Reply:
    gaps_s = np.array(result.itls[index], np.float64)
    ttft_s = result.ttfts[index]
    e2el_s = ttft_s + gaps_s.sum() if result.latencies is None else result.latencies[index]
    if with_role and len(gaps_s):
        ttft_s, gaps_s = ttft_s + gaps_s[0], gaps_s[1:]
    return Reply(
        index=index,
        ttft_ms=float(ttft_s) * 1e3,
        e2el_ms=float(e2el_s) * 1e3,
        num_tokens=result.output_lens[index],
        gaps_ms=gaps_s * 1e3,
    )
