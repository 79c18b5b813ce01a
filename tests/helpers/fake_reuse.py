"""An engine that reuses KV, and Mooncake's master or two of LMCache's servers beside it, as one
HTTP server that may misbehave.

``faults`` are of: ``holds nothing`` (the store takes nothing), ``never ends`` (to take it),
``mute`` (nor says how much it holds), ``keeps`` (the engine's own prefix cache is not dropped),
``forgets`` (no hits), ``wrong`` (answers differ after a hit), ``counts nothing``,
``notes nothing``, ``nearer`` (the store beside the engine has it all), ``nowhere`` (no store says
that it had it), ``ends`` (a program, once a prompt was sent).
"""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvxfer.connectors.vllm.timings import Timings
from kvxfer.errors import PeerLost
from kvxfer.pd.experiments.kv_reuse.cases import UNIT_TOKENS
from kvxfer.pd.result import PDSetup, Reuse

TOKEN_BYTES = 4096
Prefix = tuple[int, ...]


def reuse_setup(reuse: Reuse, model: str = "tiny", **changes: Any) -> PDSetup:
    """A record of one engine."""
    fields = {"name": str(reuse), "kind": "aggregated", "connector": "none"}
    return PDSetup(model=model, reuse=reuse, **{**fields, **changes})


class FakeReuse:
    """Its state; ``stack`` is what an `Asker` is given."""

    def __init__(
        self, folder: Path, *faults: str, has_store: bool = True, is_far: bool = False
    ) -> None:
        self.faults = faults
        self.has_store = has_store
        self.is_far = is_far
        self.chunks = {"read_from_peers": 0, "found_here": 0}
        self.own: list[Prefix] = []
        self.stored: list[Prefix] = []
        self.counts = {"prompt_tokens": 0, "prefix_cache_hits": 0, "external_prefix_cache_hits": 0}
        self.asked: list[dict[str, Any]] = []
        self.url = ""
        self._folder = folder
        self._timings = Timings(None if "notes nothing" in faults else folder / "timings.jsonl")
        if has_store:
            self._timings.note("cache", token_bytes=TOKEN_BYTES)

    @property
    def stack(self) -> Any:
        program = SimpleNamespace(url=self.url)
        return SimpleNamespace(
            url=self.url,
            engines=[program],
            store=program if self.has_store else None,
            folder=self._folder,
            require_alive=self._require_alive,
        )

    def _require_alive(self) -> None:
        if "ends" in self.faults and self.asked:
            raise PeerLost("far-store ended with status 1")

    def page(self, path: str) -> str:
        """What a GET finds."""
        put = len(self.stored)
        begun = put + ("never ends" in self.faults and put > 0)
        held = (
            f"master_batch_put_start_items_total {begun}\nmaster_batch_put_end_items_total {put}\n"
        )
        if self.is_far:
            objects = {"total_object_count": begun - put, "write_locked_count": 0}
            held = json.dumps(objects | self.chunks | {"moved_to_peers": put})
        held = "" if "mute" in self.faults else held
        counts = {} if "counts nothing" in self.faults else self.counts
        lines = [f'vllm:{name}_total{{engine="0"}} {value}.0\n' for name, value in counts.items()]
        return "".join([*lines, 'vllm:num_requests_running{engine="0"} 0.0\n', held])

    def drop(self) -> str:
        """Of a POST to /reset_prefix_cache."""
        if "keeps" not in self.faults:
            self.own.clear()
        return json.dumps({"success": "keeps" not in self.faults})

    def answer(self, body: dict[str, Any]) -> str:
        """The text of a completion, after what it costs."""
        self.asked.append(body)
        prompt: Prefix = tuple(body["prompt"])
        own, stored = (self._longest(held, prompt) for held in (self.own, self.stored))
        loaded = max(0, stored - own) if self.has_store else 0
        if "nowhere" not in self.faults:
            place = "found_here" if "nearer" in self.faults else "read_from_peers"
            self.chunks[place] += -(-loaded // UNIT_TOKENS)
        self.counts["prompt_tokens"] += len(prompt)
        self.counts["prefix_cache_hits"] += own
        self.counts["external_prefix_cache_hits"] += loaded
        self._note(f"cmpl-{body.get('request_id', 'x')}-0-abc", loaded)
        self.own.append(prompt)
        if self.has_store and "holds nothing" not in self.faults:
            self.stored.append(prompt)
        changed = "wrong" in self.faults and own + loaded > 0
        return " ".join(f"w{token + changed}" for token in prompt[-body["max_tokens"] :])

    def _longest(self, held: list[Prefix], prompt: Prefix) -> int:
        if "forgets" in self.faults:
            return 0
        found = [len(one) for one in held if prompt[: len(one)] == one]
        return min(max(found, default=0), len(prompt) - 1)

    def _note(self, request: str, loaded: int) -> None:
        if not self.has_store:
            return
        self._timings.note("arrived", request)
        self._timings.note("asked", request)
        self._timings.note("answered", request, num_tokens=loaded)
        for what in ("placed", "begun", "loaded") if loaded else ():
            time.sleep(0.002)
            self._timings.note(what, request)  # type: ignore[arg-type]
        self._timings.note("scheduled", request)


@contextmanager
def serving(fake: FakeReuse) -> Iterator[FakeReuse]:
    """While it answers at ``fake.url``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send(fake.page(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/reset_prefix_cache":
                self._send(fake.drop())
                return
            choices = [{"index": 0, "text": fake.answer(body)}]
            text = json.dumps({"choices": choices})
            self._send(f"data: {text}\n\ndata: [DONE]\n\n" if body.get("stream") else text)

        def _send(self, text: str) -> None:
            data = text.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
