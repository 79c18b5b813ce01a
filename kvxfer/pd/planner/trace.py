"""Requests as a load brings them: when, how long, and what of their prompts they share."""

from dataclasses import dataclass
from itertools import pairwise

from kvxfer.errors import InvalidUsage

MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1 << 24
"""Most tokens of one prompt or reply."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request; times in seconds from the start of the trace.

    ``prefix_hashes`` name the prompt's blocks of ``Trace.hash_tokens`` tokens, in order: a hash
    stands for its block and all before it, so that equal hashes are KV that can be used again.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_hashes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.arrival_s < 1e9:
            raise InvalidUsage(f"arrival_s is {self.arrival_s}; use seconds from 0 to 1e9")
        for name in ("num_prompt_tokens", "num_output_tokens"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_TOKENS:
                raise InvalidUsage(f"{name} is {value}; use 1 to {MAX_TOKENS}")


@dataclass(frozen=True, slots=True)
class Trace:
    """A load: requests by arrival.

    Args:
        name: what to call it in a report.
        requests: sorted by ``arrival_s``.
        concurrency: most requests in flight: one that arrives while so many are waits at the
            client, and its times run from when it is sent (``vllm bench serve
            --max-concurrency``). None: no limit.
        hash_tokens: tokens of one block of ``prefix_hashes``.

    Raises:
        InvalidUsage: no requests, too many, out of order, or a number below 1.
    """

    name: str
    requests: tuple[Request, ...]
    concurrency: int | None = None
    hash_tokens: int = 512

    def __post_init__(self) -> None:
        if not 1 <= len(self.requests) <= MAX_REQUESTS:
            raise InvalidUsage(
                f"the trace {self.name} has {len(self.requests)} requests; use 1 to {MAX_REQUESTS}"
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidUsage(f"concurrency is {self.concurrency}; use 1 or more")
        if self.hash_tokens < 1:
            raise InvalidUsage(f"hash_tokens is {self.hash_tokens}; use 1 or more")
        arrivals = [request.arrival_s for request in self.requests]
        if any(later < earlier for earlier, later in pairwise(arrivals)):
            raise InvalidUsage(f"the trace {self.name} is not sorted by arrival; sort it first")
