"""Lines of a trace file, within bounds, and read once: it may be a pipe."""

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.trace import MAX_REQUESTS, Request, Trace

MAX_TRACE_BYTES = 1 << 30


def lines_of(path: Path, most_requests: int | None = None) -> list[bytes]:
    """Lines of the file; empty ones too, so that numbers are those of the file.

    Args:
        most_requests: what comes after so many lines and a header is not read; None: what comes
            after one more than `MAX_REQUESTS`.

    Raises:
        InvalidUsage: the file cannot be read, is too large or has no lines.
    """
    most_lines = (MAX_REQUESTS + 1 if most_requests is None else most_requests) + 1
    try:
        lines = _read(path, most_lines)
    except OSError as error:
        raise InvalidUsage(f"cannot read {path}: {error.strerror}") from error
    lines[:1] = [line.removeprefix(codecs.BOM_UTF8) for line in lines[:1]]
    if not any(map(bytes.strip, lines)):
        raise InvalidUsage(f"{path} is empty; use a trace")
    return lines


def _read(path: Path, most: int) -> list[bytes]:
    """Up to so many lines that are not empty, and empty ones between."""
    lines: list[bytes] = []
    num_filled = 0
    left = MAX_TRACE_BYTES
    with path.open("rb") as file:
        while num_filled < most and (line := file.readline(left + 1)):
            left -= len(line)
            if left < 0:
                raise InvalidUsage(
                    f"{path} is larger than {MAX_TRACE_BYTES} bytes, the most that is read; "
                    "use fewer requests"
                )
            lines.append(line)
            num_filled += bool(line.strip())
    return lines


def trace_of(
    path: Path,
    lines: list[bytes],
    parse: Callable[[bytes], Request],
    *,
    most_requests: int | None,
    first_line: int = 1,
    hash_tokens: int = 512,
) -> Trace:
    """A trace with a request a line, sorted by arrival, from zero on.

    Args:
        parse: gives the request of a line, or raises `ValueError`.
        most_requests: the first so many lines; None: all.
        first_line: the number of ``lines[0]`` in the file.

    Raises:
        InvalidUsage: a line cannot be parsed, names it; or there are no requests, or too many.
    """
    requests: list[Request] = []
    for number, line in enumerate(lines, first_line):
        if not line.strip():
            continue
        if len(requests) == most_requests:
            break
        if len(requests) == MAX_REQUESTS:
            raise InvalidUsage(
                f"{path} has more than {MAX_REQUESTS} requests, the most that is simulated; take "
                "the first ones (--most-requests)"
            )
        try:
            requests.append(parse(line))
        except (ValueError, OverflowError, RecursionError) as error:  # InvalidUsage is a ValueError
            _refuse(path, number, error)
    if not requests:
        raise InvalidUsage(f"{path} has no request; use a trace")
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(path.name, tuple(requests), hash_tokens=hash_tokens)


def _refuse(path: Path, number: int, error: Exception) -> NoReturn:
    raise InvalidUsage(f"{path}, line {number}: {error}") from error
