"""Azure's traces: CSV with ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``.

Source: Azure/AzurePublicDataset (CC-BY 4.0), of Patel et al., "Splitwise: Efficient Generative LLM
Inference Using Phase Splitting", ISCA 2024. Time stamps have seven digits after the point and no
time zone.
"""

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.trace import Request, Trace
from kvxfer.pd.planner.traces._lines import lines_of, trace_of

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"
_EPOCH = datetime(2000, 1, 1, tzinfo=timezone.utc)


def read_azure(path: Path) -> Trace:
    """Read an Azure trace; its first request comes at 0 s. A reply of no token counts as one.

    Raises:
        InvalidUsage: it cannot be read, has another header, or a line is not of the format.
    """
    lines = lines_of(path)
    if lines[0].strip() != HEADER:
        raise InvalidUsage(f"{path} does not begin with {HEADER.decode()}; use a trace of Azure's")
    trace = trace_of(path, lines[1:], _request, first_line=2)
    start_s = trace.requests[0].arrival_s
    moved = (replace(request, arrival_s=request.arrival_s - start_s) for request in trace.requests)
    return replace(trace, requests=tuple(moved))


def _request(line: bytes) -> Request:
    fields = line.decode("ascii").strip().split(",")
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields, not 3")
    stamp, _, digits = fields[0].partition(".")
    at = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc)
    arrival_s = (at - _EPOCH).total_seconds() + float(f"0.{digits or 0}")
    return Request(arrival_s, int(fields[1]), max(1, int(fields[2])))
