"""A trace file of any format."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.trace import Trace
from kvxfer.pd.planner.traces import azure, mooncake, vllm
from kvxfer.pd.planner.traces._lines import lines_of

Form: TypeAlias = Literal["auto", "mooncake", "vllm", "azure"]
MAX_SECONDS_SCALE = 1e6

_READERS: dict[str, Callable[[Path, list[bytes], int | None], Trace]] = {
    "mooncake": mooncake.mooncake_of,
    "vllm": vllm.vllm_of,
    "azure": azure.azure_of,
}


def read_trace(
    path: Path, *, form: Form = "auto", most_requests: int | None = None, speed: float = 1.0
) -> Trace:
    """Read a trace.

    Args:
        form: ``auto`` goes by the first line: a CSV is Azure's, a JSONL is Mooncake's where its
            hash ids stand for 512 tokens each, else vLLM's.
        most_requests: the first so many of the file; None: all.
        speed: 2.0 sends them in half the time.

    Raises:
        InvalidUsage: the file cannot be read, is of no known format, or a line is wrong.
    """
    if form not in ("auto", *_READERS):
        raise InvalidUsage(f"the format {form!r} is not known; use auto, {', '.join(_READERS)}")
    if not 0.0 < speed < MAX_SECONDS_SCALE:
        raise InvalidUsage(
            f"speed is {speed}; use a factor above 0 and below {MAX_SECONDS_SCALE:g}"
        )
    if most_requests is not None and most_requests < 1:
        raise InvalidUsage(f"most_requests is {most_requests}; use 1 or more")
    lines = lines_of(path, most_requests)
    read = _READERS[_form_of(path, lines) if form == "auto" else form]
    trace = read(path, lines, most_requests)
    if speed == 1.0:
        return trace
    sped = (replace(one, arrival_s=one.arrival_s / speed) for one in trace.requests)
    return replace(trace, requests=tuple(sped))


def _form_of(path: Path, lines: list[bytes]) -> str:
    first = next(filter(bytes.strip, lines)).strip()
    if first == azure.HEADER:
        return "azure"
    try:
        line = msgspec.json.decode(first, type=vllm.TimedLine)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidUsage(
            f"{path} begins like no trace that is known (Azure's CSV, JSONL of Mooncake's or "
            f"vLLM's): {error}"
        ) from error
    if not line.hash_ids:
        raise InvalidUsage(
            f"{path} has no hash_ids in its first line, and time stamps do not say their unit; "
            "name the format: mooncake (ms) or vllm (s)"
        )
    covers = len(line.hash_ids) * mooncake.HASH_TOKENS
    is_mooncake = covers - mooncake.HASH_TOKENS < line.input_length <= covers
    return "mooncake" if is_mooncake else "vllm"
