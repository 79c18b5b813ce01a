"""A trace as a load: ``vllm bench serve --dataset-name timed_trace`` sends its requests on time.

Prompts are made from the trace's hash ids, so that prompts that share ids share tokens; a trace
without them has no prompts to send.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.trace import Trace
from kvxfer.pd.planner.traces import read_trace
from kvxfer.pd.planner.traces.mooncake import HASH_TOKENS
from kvxfer.pd.result import MAX_RATE, MIN_RATE, PDPoint


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace that the client can send.

    Args:
        path: its file: JSONL of Mooncake's or of vLLM's kind.
        trace: its content.
        unit_s: seconds that one of its time stamps counts.
    """

    path: Path
    trace: Trace
    unit_s: float

    @property
    def name(self) -> str:
        """Of its points: the file's, as far as a file's name may have it."""
        return re.sub("[^A-Za-z0-9_]", "_", self.path.stem)[:40]

    def point(self, concurrency: int) -> PDPoint:
        """The whole trace with at most so many requests in flight; sizes and rate are means."""
        requests = self.trace.requests
        count = len(requests)
        lasts_s = requests[-1].arrival_s - requests[0].arrival_s
        rate = (count - 1) / lasts_s if lasts_s > 0 else MAX_RATE
        return PDPoint(
            concurrency=concurrency,
            num_prompts=count,
            isl=max(1, round(sum(one.num_prompt_tokens for one in requests) / count)),
            osl=max(1, round(sum(one.num_output_tokens for one in requests) / count)),
            request_rate=float(f"{min(MAX_RATE, max(MIN_RATE, rate)):.3g}"),
            trace=self.name,
        )

    def options(self) -> dict[str, str]:
        """What the client is told of it."""
        return {
            "--dataset-name": "timed_trace",
            "--dataset-path": str(self.path.resolve()),
            "--timed-trace-chunk-hash-size": str(self.trace.hash_tokens),
            "--timed-trace-sec-multiplier": f"{self.unit_s:g}",
        }


def read_replay(path: Path) -> Replay:
    """Read a trace that is to be sent.

    Raises:
        InvalidUsage: it cannot be read, is of a kind that the client does not send (Azure's CSV),
            or a request has too few hash ids for its prompt.
    """
    if path.suffix.lower() == ".csv":
        raise InvalidUsage(f"{path}: the client sends JSONL of Mooncake's or vLLM's kind, no CSV")
    trace = read_trace(path)
    for number, one in enumerate(trace.requests, 1):
        covered = len(one.prefix_hashes) * trace.hash_tokens
        if covered < one.num_prompt_tokens:
            raise InvalidUsage(
                f"{path}: request {number} has {one.num_prompt_tokens} tokens, and its hash_ids "
                f"stand for {covered}; prompts are made from them"
            )
    is_mooncake = trace.hash_tokens == HASH_TOKENS  # time stamps in ms
    return Replay(path, trace, 1e-3 if is_mooncake else 1.0)
