"""A load like that of users: lengths that differ, prompts that begin alike, arrivals in bursts.

A made-up mixture, not a trace of anyone's: short chats, documents, and a few long prompts, most
behind one of a few system prompts. Lengths scale with the largest, so that a small model can serve
it too.
"""

import json
from pathlib import Path
from typing import Final

import numpy as np

from kvxfer.errors import InvalidUsage

HASH_TOKENS: Final = 16
"""Tokens that a hash id of the written trace stands for: vLLM's own."""
NUM_PREFIXES: Final = 4
SHARED: Final = 0.7
"""Of the requests, those behind a system prompt."""
_KINDS: Final = ((0.70, 1 / 16, 1 / 4), (0.25, 1 / 4, 1 / 2), (0.05, 1 / 2, 1.0))
"""Share of the requests, and from which to which part of the longest prompt theirs are."""
_PREFIX: Final = 1 / 16  # of the longest prompt


def write_mixed_trace(
    path: Path,
    *,
    num_requests: int,
    longest: int,
    osl: int,
    requests_per_s: float,
    burstiness: float = 0.5,
    seed: int = 0,
) -> Path:
    """Write such a trace as JSONL of vLLM's kind; the same arguments write the same file.

    Args:
        longest: tokens of the longest prompt, 256 or more.
        osl: tokens of the longest reply; the shortest have a quarter.
        requests_per_s, burstiness: as `kvxfer.pd.planner.traces.open_loop`.

    Raises:
        InvalidUsage: a number is out of range, or the file cannot be written.
    """
    if longest < 256 or osl < 1 or num_requests < 1 or not requests_per_s > 0:
        raise InvalidUsage(
            f"a trace of {num_requests} requests, {requests_per_s} a second, up to {longest} "
            f"tokens in and {osl} out; use 1, more than 0, 256 and 1 or more"
        )
    rng = np.random.default_rng(seed)
    waits_s = rng.gamma(burstiness, 1 / requests_per_s / burstiness, num_requests)
    arrivals_s = np.cumsum(waits_s) - waits_s[0]
    shares = [share for share, _, _ in _KINDS]
    next_id = NUM_PREFIXES * longest  # above all ids of prefixes
    lines = []
    for at_s, kind in zip(arrivals_s, rng.choice(len(_KINDS), num_requests, p=shares), strict=True):
        _, low, high = _KINDS[kind]
        tokens = int(rng.integers(round(longest * low), round(longest * high) + 1))
        num_blocks = -(-tokens // HASH_TOKENS)
        prefix = _prefix(rng, longest, num_blocks)
        own = num_blocks - len(prefix)
        lines.append(
            {
                "timestamp": round(float(at_s), 4),
                "input_length": tokens,
                "output_length": int(rng.integers(max(1, osl // 4), osl + 1)),
                "hash_ids": [*prefix, *range(next_id, next_id + own)],
            }
        )
        next_id += own
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise InvalidUsage(f"cannot write {path}: {error.strerror}") from error
    return path


def _prefix(rng: np.random.Generator, longest: int, num_blocks: int) -> list[int]:
    """Hash ids of the system prompt that a request begins with; none of the other requests'."""
    if rng.random() >= SHARED:
        return []
    length = min(num_blocks, max(1, round(longest * _PREFIX) // HASH_TOKENS))
    first = int(rng.integers(NUM_PREFIXES)) * longest
    return list(range(first, first + length))
