"""Lines of a trace file, within bounds."""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.trace import MAX_REQUESTS, Request, Trace
from kvxfer.whole_file import read_bounded

MAX_TRACE_BYTES = 1 << 30


def lines_of(path: Path) -> list[bytes]:
    """Lines without their ends; empty ones too, so that numbers are those of the file.

    Raises:
        InvalidUsage: the file cannot be read, is too large or has no lines or too many.
    """
    lines = read_bounded(path, MAX_TRACE_BYTES).splitlines()
    if not lines:
        raise InvalidUsage(f"{path} is empty; use a trace")
    if len(lines) > MAX_REQUESTS:
        raise InvalidUsage(f"{path} has {len(lines)} lines; use {MAX_REQUESTS} at the most")
    return lines


def trace_of(
    path: Path,
    lines: list[bytes],
    parse: Callable[[bytes], Request],
    *,
    first_line: int = 1,
    hash_tokens: int = 512,
) -> Trace:
    """A trace with a request a line, sorted by arrival, from zero on.

    Args:
        parse: gives the request of a line, or raises `ValueError`.
        first_line: the number of ``lines[0]`` in the file.

    Raises:
        InvalidUsage: a line cannot be parsed; names it.
    """
    requests = []
    for number, line in enumerate(lines, first_line):
        if not line.strip():
            continue
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
