"""Real vLLM engines on a CPU: a prefill and a decode one, joined by the connector."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from free_ports import free_port, free_ports
from openai_server import MODEL, Server
from vllm_fakes import receive_params, send_params
from waiting import GUARD_S

START_S = 240.0
TINY = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 64}  # of the model "tiny"
BLOCK_TOKENS = 128  # of vLLM on a CPU


class Engine(Server):
    """``python -m vllm.entrypoints.openai.api_server`` on one CPU core."""

    def __init__(
        self, model: Path, log: Path, *, core: int, transfer: Mapping[str, Any], args: Sequence[str]
    ) -> None:
        super().__init__(free_port())
        self._log = log
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        words += ["--model", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1"]
        words += ["--port", str(self.port), "--dtype", "float32", "--max-model-len", "4096"]
        words += ["--enforce-eager", "--kv-transfer-config", json.dumps(transfer), *args]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "VLLM_NO_USAGE_STATS": "1",
        }
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                words, env=environment, cwd="/", stdout=out, stderr=out, start_new_session=True
            )

    def wait_until_up(self) -> None:
        end_s = time.monotonic() + START_S
        while not self._is_up():
            assert self._process.poll() is None, f"it ended: {self.tail()}"
            assert time.monotonic() < end_s, f"not up after {START_S} s: {self.tail()}"
            time.sleep(0.5)

    def _is_up(self) -> bool:
        try:
            return self.get("/health") == ""
        except OSError:
            return False

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def page_format(self) -> str:
        """How its pages lie, as the connector says at the start."""
        found = re.search(r"groups, (\S+) pages of", self._log.read_text(errors="replace"))
        assert found, self.tail()
        return found[1]

    def is_drained(self) -> bool:
        """Whether no request is open and no block in use."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(self.metric(f"vllm:{name}") == 0 for name in names)

    def stop(self) -> None:
        """End it with all its processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._process.wait(20)


class Pair:
    """A prefill engine, and a decode engine that its prompts go to."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        on_failure: str,
        transport: str = "auto",
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self.transport = transport
        self.channels = init, alloc = free_ports(2)
        self.addresses = {"init": f"tcp://127.0.0.1:{init}", "alloc": f"tcp://127.0.0.1:{alloc}"}
        loaded = {
            "kv_connector": "KvxferConnector",
            "kv_connector_module_path": "kvxfer.connectors.vllm",
        }
        both = {"transport": transport}
        receives = {"init_ports": [init], "alloc_ports": [alloc], "on_failure": on_failure}
        self.prefill = Engine(
            model,
            folder / "prefill.log",
            core=0,
            transfer=loaded | {"kv_role": "kv_producer", "kv_connector_extra_config": both},
            args=prefill,
        )
        self.decode = Engine(
            model,
            folder / "decode.log",
            core=1,
            transfer=loaded
            | {
                "kv_role": "kv_consumer",
                "kv_connector_extra_config": both | receives | settings,
            },
            args=decode,
        )
        self._numbers = iter(range(1_000_000))

    @contextmanager
    def running(self) -> "Iterator[Pair]":
        """Itself, once both engines are up, and ended with the block."""
        try:
            self.prefill.wait_until_up()
            self.decode.wait_until_up()
            yield self
        finally:
            self.stop()

    def new_id(self) -> str:
        return f"transfer-{next(self._numbers)}"

    def prefill_body(self, body: Mapping[str, Any], transfer_id: str) -> dict[str, Any]:
        """The prefill leg of a request, to this decode engine."""
        dropped = ("stream", "stream_options", "min_tokens", "n", "max_completion_tokens")
        kept = {name: value for name, value in body.items() if name not in dropped}
        params = send_params(transfer_id, self.addresses)
        return {**kept, "max_tokens": 1, "kv_transfer_params": params}

    def hand_over(self, body: Mapping[str, Any], path: str = "/v1/completions") -> Any:
        """The decode engine's reply to a request whose prompt the other engine computes."""
        with self.prefilling(body, path) as params:
            return self.decode.ask({**body, "kv_transfer_params": params}, path)

    @contextmanager
    def prefilling(
        self, body: Mapping[str, Any], path: str = "/v1/completions"
    ) -> Iterator[dict[str, Any]]:
        """The prefill leg at work; gives what the decode leg takes."""
        transfer_id = self.new_id()
        with ThreadPoolExecutor(1) as thread:
            leg = thread.submit(self.prefill.ask, self.prefill_body(body, transfer_id), path)
            yield receive_params(transfer_id)
            leg.result(GUARD_S)

    def alone(self, body: Mapping[str, Any], path: str = "/v1/completions") -> Any:
        """What one server says: the prefill engine, which computes all of it itself."""
        return self.prefill.ask(body, path)

    def stop(self) -> None:
        self.prefill.stop()
        self.decode.stop()


class Front(Server):
    """``kvxfer pd proxy`` before a pair. A context manager."""

    def __init__(self, pair: Any, *more: str) -> None:
        init, alloc = pair.channels
        ports = {
            "--port": 0,
            "--prefiller-port": pair.prefill.port,
            "--decoder-port": pair.decode.port,
            "--decoder-init-port": init,
            "--decoder-alloc-port": alloc,
        }
        words = [str(word) for pair in ports.items() for word in pair]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvxfer", "pd", "proxy", *words, *more],
            cwd="/",
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        super().__init__(int(json.loads(line)["url"].rpartition(":")[2]))

    def __enter__(self) -> "Front":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=GUARD_S)


def texts(reply: Any) -> list[tuple[str, str]]:
    """Text and finish reason of each choice."""
    return [(one["text"], one["finish_reason"]) for one in reply["choices"]]
