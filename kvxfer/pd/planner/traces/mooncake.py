"""Mooncake's traces: JSONL with ``timestamp`` (ms), lengths in tokens, and ``hash_ids``.

A hash id stands for a block of 512 tokens of the prompt and all before it (the last block may be
shorter): equal ids are KV that can be used again. Source: kvcache-ai/Mooncake, ``FAST25-release``;
Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025.
"""

from pathlib import Path

from kvxfer.pd.planner.trace import Trace
from kvxfer.pd.planner.traces._lines import lines_of
from kvxfer.pd.planner.traces.vllm import vllm_of

HASH_TOKENS = 512


def read_mooncake(path: Path, *, most_requests: int | None = None) -> Trace:
    """Read a Mooncake trace. A reply of no token counts as one.

    Args:
        most_requests: the first so many of the file; None: all.

    Raises:
        InvalidUsage: it cannot be read, or a line is not of the format; names the line.
    """
    return mooncake_of(path, lines_of(path, most_requests), most_requests)


def mooncake_of(path: Path, lines: list[bytes], most_requests: int | None) -> Trace:
    """The same of lines that were read."""
    return vllm_of(path, lines, most_requests, hash_tokens=HASH_TOKENS, unit_s=1e-3)
