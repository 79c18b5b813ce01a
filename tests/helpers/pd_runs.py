"""Runs of a benchmark for tests: engines simulated step by step, written as vLLM's client does.

An aggregated engine prefills and decodes in one step loop, so that decoding waits for prefills; a
PD pair prefills on one clock and decodes on another. The load is a closed loop, as the client's.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvxfer.pd.result import PDPoint, PDSetup, bench_path, save_point, save_setup

Result = dict[str, Any]
CLIENT_S = 1e-4  # from the last token until the client sends the next request


@dataclass
class Stream:
    """One request: when it was sent and when each token came, in seconds."""

    start_s: float
    ready_s: float = 0.0  # PD: when the decode engine may take it
    unread: int = 0  # tokens of the prompt that are not prefilled
    tokens_s: list[float] = field(default_factory=list)


@dataclass
class Engines:
    """Times of a simulated set-up; ``jitter`` is the spread of a step, as a fraction."""

    kind: str = "aggregated"
    step_s: float = 5e-3
    prefill_s_per_token: float = 15e-6
    transfer_s: float = 4e-3
    token_budget: int = 8192
    first_token_from: str = "decode"  # or "prefill": of a proxy that passes that token on
    jitter: float = 0.05
    seed: int = 0

    def simulate(self, concurrency: int, num_prompts: int, isl: int, osl: int) -> list[Stream]:
        """Streams in the order sent."""
        self._random = random.Random(self.seed)
        self._prefill_free_s = 0.0
        now_s = 0.0
        streams = [self._send(0.0, isl) for _ in range(min(concurrency, num_prompts))]
        open_streams = list(streams)
        while open_streams:
            now_s = self._step(now_s, open_streams)
            for done in [one for one in open_streams if len(one.tokens_s) >= osl]:
                open_streams.remove(done)
                if len(streams) < num_prompts:
                    streams.append(self._send(done.tokens_s[-1] + CLIENT_S, isl))
                    open_streams.append(streams[-1])
        return streams

    def _send(self, now_s: float, isl: int) -> Stream:
        if self.kind == "aggregated":
            return Stream(now_s, unread=isl)
        begin_s = max(self._prefill_free_s, now_s)
        self._prefill_free_s = begin_s + isl * self.prefill_s_per_token * self._spread()
        if self.kind == "prefill_only":
            return Stream(now_s, self._prefill_free_s)
        stream = Stream(now_s, self._prefill_free_s + self.transfer_s * self._spread())
        if self.first_token_from == "prefill":
            stream.tokens_s.append(self._prefill_free_s)
        return stream

    def _step(self, now_s: float, streams: list[Stream]) -> float:
        """One step of the engine that decodes; returns when it ends."""
        if self.kind == "prefill_only":
            now_s = min(one.ready_s for one in streams)
            for one in streams:
                if one.ready_s == now_s:
                    one.tokens_s.append(now_s)
            return now_s
        if self.kind == "pd":
            now_s = max(now_s, min(one.ready_s for one in streams))
        running = [one for one in streams if one.unread == 0 and one.ready_s <= now_s]
        end_s = now_s + self.step_s * self._spread()
        prefilled = next((one for one in streams if one.unread), None)
        if prefilled is not None:
            chunk = min(prefilled.unread, self.token_budget)
            prefilled.unread -= chunk
            end_s += chunk * self.prefill_s_per_token
            running += [prefilled] if prefilled.unread == 0 else []
        for one in running:
            one.tokens_s.append(end_s)
        return end_s

    def _spread(self) -> float:
        return 1.0 + self._random.uniform(-self.jitter, self.jitter)


def client_json(streams: list[Stream], isl: int, *, chat: bool = False) -> Result:
    """What the client writes of them; in chat, a role comes just before the first token."""
    messages = [[*one.tokens_s[:1], *one.tokens_s] if chat else one.tokens_s for one in streams]
    end_s = max(one.tokens_s[-1] for one in streams)
    pairs = list(zip(streams, messages, strict=True))
    return {
        "backend": "openai-chat" if chat else "vllm",
        "endpoint_type": "openai-chat" if chat else "vllm",
        "request_rate": "inf",
        "duration": end_s + 1e-3,
        "completed": len(streams),
        "failed": 0,
        "mean_rtfx": float("nan"),  # the client's writer is not strict
        "input_lens": [isl] * len(streams),
        "output_lens": [len(one.tokens_s) for one in streams],
        "ttfts": [times[0] - one.start_s for one, times in pairs],
        "itls": [[b - a for a, b in pairwise(times)] for times in messages],
        "latencies": [one.tokens_s[-1] - one.start_s for one in streams],
        "start_times": [1672.0 + one.start_s for one in streams],
        "generated_texts": ["x"] * len(streams),
        "errors": [""] * len(streams),
    }


@dataclass
class Bench:
    """Writes set-ups of a run, a point at a time."""

    folder: Path

    def setup(self, name: str, engines: Engines, **fields: Any) -> Path:
        """A set-up's folder with its record."""
        pd = engines.kind == "pd"
        record: dict[str, Any] = {
            "name": name,
            "kind": engines.kind,
            "connector": "kvxfer" if pd else "none",
            "model": "llama-3.1-8b",
            "num_decode": int(pd),
            "token_budget": engines.token_budget,
            **fields,
        }
        save_setup(self.folder / name, PDSetup(**record))
        return self.folder / name

    def point(
        self,
        name: str,
        engines: Engines,
        concurrency: int,
        *,
        isl: int = 8192,
        osl: int = 128,
        num_prompts: int | None = None,
        chat: bool = False,
        spoil: Callable[[Result], None] = lambda result: None,
        **fields: Any,
    ) -> Result:
        """Simulate and write one point, the client's JSON as ``spoil`` leaves it."""
        num_prompts = 10 * concurrency if num_prompts is None else num_prompts
        result = client_json(engines.simulate(concurrency, num_prompts, isl, osl), isl, chat=chat)
        spoil(result)
        record = {"concurrency": concurrency, "num_prompts": num_prompts, "isl": isl, "osl": osl}
        point = PDPoint(**{**record, **fields})
        bench_path(self.folder / name, point).write_text(json.dumps(result))
        save_point(self.folder / name, point)
        return result

    def all(self, name: str, engines: Engines, concurrencies: list[int], **load: Any) -> None:
        """A set-up with a point for each concurrency."""
        self.setup(name, engines)
        for concurrency in concurrencies:
            self.point(name, engines, concurrency, **load)
