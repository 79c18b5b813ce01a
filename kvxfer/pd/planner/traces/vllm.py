"""vLLM's traces: JSONL of ``vllm bench serve --dataset-name timed_trace``.

The fields are Mooncake's, but time stamps are seconds and a hash id stands for 16 tokens, unless
the bench was told otherwise (``--timed-trace-sec-multiplier``, ``--timed-trace-chunk-hash-size``).
"""

from pathlib import Path
from typing import Annotated

import msgspec

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.trace import MAX_TOKENS, Request, Trace
from kvxfer.pd.planner.traces._lines import lines_of, trace_of


class TimedLine(msgspec.Struct):
    """A request of a JSONL trace; ``timestamp`` in the unit of its kind of file."""

    timestamp: Annotated[float, msgspec.Meta(ge=0.0, lt=1e15)]
    input_length: int
    output_length: int
    hash_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS)] = []

    def request(self, unit_s: float) -> Request:
        """The request, where a time stamp counts so many seconds; no token of a reply is one."""
        return Request(
            self.timestamp * unit_s,
            self.input_length,
            self.output_length or 1,
            tuple(self.hash_ids),
        )


def read_vllm(
    path: Path,
    *,
    most_requests: int | None = None,
    hash_tokens: int = 16,
    unit_s: float = 1.0,
) -> Trace:
    """Read a timed trace of vLLM's. A reply of no token counts as one.

    Args:
        most_requests: the first so many of the file; None: all.
        hash_tokens: tokens that one of ``hash_ids`` stands for.
        unit_s: seconds that one of ``timestamp`` counts.

    Raises:
        InvalidUsage: it cannot be read, or a line is not of the format; names the line.
    """
    if not 0.0 < unit_s < 1e6:
        raise InvalidUsage(f"unit_s is {unit_s}; use seconds above 0 and below 1e6")
    lines = lines_of(path, most_requests)
    return vllm_of(path, lines, most_requests, hash_tokens=hash_tokens, unit_s=unit_s)


def vllm_of(
    path: Path,
    lines: list[bytes],
    most_requests: int | None,
    *,
    hash_tokens: int = 16,
    unit_s: float = 1.0,
) -> Trace:
    """The same of lines that were read."""
    decode = msgspec.json.Decoder(TimedLine).decode
    return trace_of(
        path,
        lines,
        lambda line: decode(line).request(unit_s),
        most_requests=most_requests,
        hash_tokens=hash_tokens,
    )
