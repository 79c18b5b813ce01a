"""An engine whose costs are known, to be measured: on a clock of its own, or over HTTP."""

import itertools
import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvxfer.pd.planner.profile_streams import Stream, TimeUp


@dataclass
class Job:
    """One request that the engine has."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_tokens: int = 0  # so far
    out: "queue.SimpleQueue[int]" = field(default_factory=queue.SimpleQueue)


@dataclass
class KnownEngine:
    """Costs in seconds, as of `StepModel`; a step prefills one prompt whole, beside decodes."""

    decode_s: float = 4e-3
    sequence_s: float = 1e-4
    context_s: float = 3e-8
    prefill_base_s: float = 5e-3
    token_s: float = 2e-5
    request_s: float = 8e-3
    jobs: list[Job] = field(default_factory=list)

    def step(self) -> tuple[float, list[Job]]:
        """How long the next step takes, and who gets a token at its end."""
        running = [job for job in self.jobs if job.num_tokens]
        prefilled = next((job for job in self.jobs if not job.num_tokens), None)
        context = sum(job.num_prompt_tokens + job.num_tokens for job in running)
        step_s = self.sequence_s * len(running) + self.context_s * context
        if prefilled is None:
            return self.decode_s + step_s, running
        chunk_s = self.prefill_base_s + self.token_s * prefilled.num_prompt_tokens
        return chunk_s + step_s, [*running, prefilled]

    def give(self, jobs: list[Job]) -> None:
        """A token to each; those that have all of theirs leave."""
        for job in jobs:
            job.num_tokens += 1
            job.out.put(job.num_tokens)
        self.jobs = [job for job in self.jobs if job.num_tokens < job.num_output_tokens]


@dataclass
class VirtualAsk:
    """An `Ask` of that engine on its own clock; ``seconds`` are left in all."""

    engine: KnownEngine
    seconds: float = 1e9
    together: bool = False  # the second token comes with the first
    now_s: float = 0.0
    asked: list[tuple[int, int, int]] = field(default_factory=list)

    def __call__(self, count: int, isl: int, osl: int) -> list[Stream]:
        self.asked.append((count, isl, osl))
        sent_s = self.now_s
        times: dict[int, list[float]] = {at: [] for at in range(count)}
        jobs = [Job(isl, osl) for _ in range(count)]
        self.engine.jobs = list(jobs)
        self.now_s += self.engine.request_s
        while self.engine.jobs:
            step_s, given = self.engine.step()
            self.now_s += step_s
            for job in given:
                times[jobs.index(job)].append(self.now_s)
            self.engine.give(given)
        if self.now_s > self.seconds:
            raise TimeUp("the time is up")
        if self.together:
            times = {at: [*one[1:2], *one[1:]] if one[1:] else one for at, one in times.items()}
        return [Stream(sent_s, tuple(one)) for one in times.values()]


@contextmanager
def served(
    engine: KnownEngine,
    *,
    model: str = "known",
    max_model_len: int = 4096,
    dies_after: int | None = None,
) -> Iterator[str]:
    """That engine behind an OpenAI server, in real time; yields its URL.

    ``dies_after``: so many requests, it answers none.
    """
    asked = itertools.count()
    ended = threading.Event()
    lock = threading.Lock()

    def loop() -> None:
        while not ended.is_set():
            with lock:
                step_s, given = engine.step() if engine.jobs else (1e-3, [])
            time.sleep(step_s)
            with lock:
                engine.give(given)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            text = json.dumps({"data": [{"id": model, "max_model_len": max_model_len}]})
            if self.path == "/metrics":
                text = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n'
            self._send(text, "application/json")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if dies_after is not None and next(asked) >= dies_after:
                return
            time.sleep(engine.request_s)
            job = Job(len(body["prompt"]), body["max_tokens"])
            with lock:
                engine.jobs.append(job)
            self.send_response(200)
            self.end_headers()
            for _ in range(job.num_output_tokens):
                job.out.get(timeout=60.0)
                self.wfile.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            self.wfile.write(b"data: [DONE]\n\n")

        def _send(self, text: str, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threads = [threading.Thread(target=run, daemon=True) for run in (loop, server.serve_forever)]
    for thread in threads:
        thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join(10.0)
