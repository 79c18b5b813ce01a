"""What ``vllm bench serve --save-result --save-detailed`` writes, checked before it is used.

Fields and units are those of vLLM's ``benchmarks/serve.py`` (read in 0.32.0): an entry a request in
each list, times in seconds, those of failed requests zero or partial. An entry of ``itls`` is the
time between two messages of the stream, not between two tokens.
"""

import json
import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from kvxfer.errors import InvalidUsage
from kvxfer.whole_file import read_bounded

MAX_RESULT_BYTES = 1 << 30
_MAX_SECONDS = 1e7

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Duration: TypeAlias = Annotated[float, msgspec.Meta(gt=0.0, le=_MAX_SECONDS)]


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are used; what else the file holds is left alone."""

    duration: _Duration
    completed: _Count
    ttfts: list[float]
    itls: list[list[float]]
    input_lens: list[_Count]
    output_lens: list[_Count]
    errors: list[str | None]
    latencies: list[float] | None = None
    start_times: list[float] | None = None
    backend: str = ""
    endpoint_type: str = ""

    def __post_init__(self) -> None:
        lists: dict[str, Sequence[object] | None] = {
            name: getattr(self, name)
            for name in ("itls", "input_lens", "output_lens", "errors", "latencies", "start_times")
        }
        for name, values in lists.items():
            if values is not None and len(values) != self.num_requests:
                raise ValueError(
                    f"{len(values)} entries in {name}, and {self.num_requests} in ttfts"
                )
        seconds = chain(self.ttfts, self.latencies or (), chain.from_iterable(self.itls))
        for value in seconds:
            if not 0.0 <= value <= _MAX_SECONDS:
                raise ValueError(f"a time of {value} s; use 0 to {_MAX_SECONDS:g}")
        if not all(map(math.isfinite, self.start_times or ())):
            raise ValueError("a start time is not a number")

    @property
    def num_requests(self) -> int:
        """Requests that were sent, failed ones too."""
        return len(self.ttfts)

    @property
    def is_chat(self) -> bool:
        """Whether chat completions were asked for."""
        return "chat" in (self.backend or self.endpoint_type)


def load_bench(path: Path) -> BenchResult:
    """Read and check the client's JSON.

    Raises:
        InvalidUsage: it cannot be read, or lacks what ``--save-detailed`` writes; names the field.
    """
    content = read_bounded(path, MAX_RESULT_BYTES)
    try:
        # The standard reader: Python's writer puts NaN where there is no figure.
        return msgspec.convert(json.loads(content), BenchResult)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(
            f"{path} is not a result of `vllm bench serve --save-result --save-detailed`: {error}"
        ) from error
