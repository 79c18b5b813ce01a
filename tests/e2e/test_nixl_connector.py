"""``kvxfer pd up --connector nixl``: vLLM's own connector between two engines on a CPU."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from urllib.parse import urlsplit

import pytest
from free_ports import free_base
from openai_server import Server
from pd_programs import OFFSETS
from vllm_engines import START_S, texts
from waiting import GUARD_S, eventually

pytest.importorskip("aiohttp", reason="the proxy needs it")
pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="NixlConnector needs nixl")

ENGINES = "--enforce-eager --max-model-len 2048 --no-enable-prefix-caching"


@contextmanager
def up(*arguments: str) -> Iterator[dict[str, Server]]:
    """``kvxfer pd up``: its proxy and its engines, by name."""
    base = free_base(OFFSETS)
    ports = ("--port", str(base + 700), "--engine-ports", str(base))
    process = subprocess.Popen(
        [sys.executable, "-m", "kvxfer", "pd", "up", *ports, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=GUARD_S)[1]
        told = json.loads(line)
        urls = {"proxy": told["url"], **{one["name"]: one["url"] for one in told["engines"]}}
        yield {name: Server(urlsplit(url).port or 0) for name, url in urls.items()}
    finally:
        process.terminate()
        process.communicate(timeout=GUARD_S)


def test_prompts_give_the_tokens_of_one_server() -> None:
    timeout = ("--start-timeout", f"{START_S:g}")
    with up("--connector", "nixl", "--engine-args", ENGINES, *timeout) as servers:
        bodies = [
            {
                "model": "tiny",
                "prompt": random.Random(seed).choices(range(1, 8000), k=300 + 97 * seed),
                "max_tokens": 8,
                "temperature": 0,
            }
            for seed in range(4)
        ]
        for body in bodies:
            assert texts(servers["proxy"].ask(body)) == texts(servers["prefill0"].ask(body))
        eventually(
            lambda: servers["decode0"].metric("vllm:external_prefix_cache_hits_total") > 0,
            "the decoder computed the prompts by itself",
        )
