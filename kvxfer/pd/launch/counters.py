"""What an engine counts of itself: the figures of vLLM's ``/metrics`` that a launcher reads.

Names: https://docs.vllm.ai/en/latest/usage/metrics.html; each is summed over its labels.
"""

import re
from dataclasses import dataclass, fields

from kvxfer.errors import KvxferError
from kvxfer.pd import client

_TIMEOUT_S = 5.0
_NAMES = {
    "num_running": "vllm:num_requests_running",
    "num_waiting": "vllm:num_requests_waiting",
    "num_prompt_tokens": "vllm:prompt_tokens_total",
    "num_output_tokens": "vllm:generation_tokens_total",
    "num_cached_tokens": "vllm:prefix_cache_hits_total",
    "num_preemptions": "vllm:num_preemptions_total",
    "num_loaded_tokens": "vllm:external_prefix_cache_hits_total",
}


@dataclass(frozen=True, slots=True)
class Counters:
    """One reading, or the difference of two.

    ``num_running`` and ``num_waiting`` are requests at that instant, in a difference the later
    ones; ``num_cached_tokens`` are prompt tokens that the prefix cache held, ``num_loaded_tokens``
    those that a connector had besides.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_loaded_tokens: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        """Of two engines together."""
        return Counters(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    def since(self, earlier: "Counters") -> "Counters":
        """What was counted after ``earlier``."""
        now = [getattr(self, name) for name in _NAMES]
        then = [0, 0, *(getattr(earlier, name) for name in list(_NAMES)[2:])]
        return Counters(*(b - a for a, b in zip(then, now, strict=True)))


assert tuple(_NAMES) == tuple(field.name for field in fields(Counters))


def read_counters(url: str) -> Counters | None:
    """The counters of the engine at ``url``; None where it has none or does not answer."""
    try:
        text = client.get(url, "/metrics", _TIMEOUT_S)
    except KvxferError:
        return None
    return parse_counters(text)


def parse_counters(text: str) -> Counters | None:
    """Read the Prometheus text format; None where nothing of vLLM is in it."""
    sums: dict[str, float] = {}
    for name, value in re.findall(
        r"^(vllm:[a-z_]+)(?:\{.*\})? ([0-9.eE+]+)(?: [0-9]+)?$", text, flags=re.MULTILINE
    ):
        sums[name] = sums.get(name, 0.0) + float(value)
    if not sums:
        return None
    return Counters(*(int(sums.get(name, 0.0)) for name in _NAMES.values()))
