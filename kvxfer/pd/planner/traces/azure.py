"""Azure's traces: CSV with ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``.

Source: Azure/AzurePublicDataset (CC-BY 4.0), of Patel et al., "Splitwise: Efficient Generative LLM
Inference Using Phase Splitting", ISCA 2024. Time stamps of 2023 have seven digits after the point
and no time zone, those of 2024 six and one; without one they are UTC.
"""

import re
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.trace import Request, Trace
from kvxfer.pd.planner.traces._lines import lines_of, trace_of

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"
_EPOCH = datetime(2000, 1, 1, tzinfo=timezone.utc)
_TIME = re.compile(
    r"([0-9-]{10})[ T]([0-9:]{8})(?:\.([0-9]{1,9}))?(Z|[+-][0-9]{2}:[0-9]{2})?",
)
_COUNT = re.compile("[0-9]{1,18}")


def read_azure(path: Path, *, most_requests: int | None = None) -> Trace:
    """Read an Azure trace; its first request comes at 0 s. A reply of no token counts as one.

    Args:
        most_requests: the first so many of the file; None: all.

    Raises:
        InvalidUsage: it cannot be read, has another header, or a line is not of the format.
    """
    return azure_of(path, lines_of(path, most_requests), most_requests)


def azure_of(path: Path, lines: list[bytes], most_requests: int | None) -> Trace:
    """The same of lines that were read."""
    if lines[0].strip() != HEADER:
        raise InvalidUsage(f"{path} does not begin with {HEADER.decode()}; use a trace of Azure's")
    trace = trace_of(path, lines[1:], _request, most_requests=most_requests, first_line=2)
    start_s = trace.requests[0].arrival_s
    moved = (replace(request, arrival_s=request.arrival_s - start_s) for request in trace.requests)
    return replace(trace, requests=tuple(moved))


def _request(line: bytes) -> Request:
    fields = line.decode("ascii").strip().split(",")
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields, not 3")
    num_in, num_out = (_count(field) for field in fields[1:])
    return Request(_seconds(fields[0]), num_in, num_out or 1)


def _seconds(stamp: str) -> float:
    match = _TIME.fullmatch(stamp)
    if match is None:
        raise ValueError(f"{stamp!r} is no time such as 2023-11-16 18:15:46.6805900")
    date, time, digits, zone = match.groups()
    # Python 3.10 reads no Z, and as many digits of a second as it likes.
    whole = datetime.fromisoformat(f"{date} {time}{'+00:00' if zone in (None, 'Z') else zone}")
    return (whole - _EPOCH).total_seconds() + float(f"0.{digits or 0}")


def _count(text: str) -> int:
    if _COUNT.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no number of tokens; use digits")
    return int(text)
