"""A proxy, its engines and a client in one event loop; and the same request to one server."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from fake_engine import CHAT, COMPLETIONS, Engine, Wire
from free_ports import free_port

from kvxfer.pd.proxy.options import Channels, EngineAddress, Limits, ProxyOptions
from kvxfer.pd.proxy.run import proxy

__all__ = ["CHAT", "COMPLETIONS"]

PROMPT = list(range(1, 40))
MESSAGES = [{"role": "user", "content": "what is a page"}]
# The ways in which a client may ask for an answer.
STREAMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "stream": {"stream": True},
    "usage": {"stream": True, "stream_options": {"include_usage": True}},
    "usage_in_each": {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
}
LIMIT_S = 90.0
# Of the first decode engine's first rank. Nobody binds them: lower than all that `free_port` gives.
INIT_PORT, ALLOC_ABOVE = 2_000, 1_000
# Far above what anything takes; but for this a refusal waits where there will be no other.
LIMITS = Limits(connect_s=60.0, refusal_s=0.3, notice_s=60.0, discard_s=60.0, probe_s=60.0)


@dataclass
class Reply:
    """What a client saw."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, [DONE] as a string."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == ""
        datas = [part.removeprefix("data: ") for part in parts]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]


def answer_of(reply: Reply) -> Any:
    """What a client reads, without the second in which it was written."""
    assert reply.status == 200, reply.body
    is_stream = reply.headers["Content-Type"].startswith("text/event-stream")
    chunks = reply.events if is_stream else [reply.json]
    return [{**chunk, "created": 0} if isinstance(chunk, dict) else chunk for chunk in chunks]


@dataclass
class Setup:
    """What a test talks to."""

    url: str
    prefill: list[Engine]
    decode: list[Engine]
    alone: Engine  # one server, for comparison
    wire: Wire
    session: aiohttp.ClientSession
    options: ProxyOptions

    async def ask(
        self, body: Any, path: str = COMPLETIONS, *, url: str = "", **options: Any
    ) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        async with self.session.post(
            (url or self.url) + path, data=data, headers=headers, **options
        ) as response:
            return Reply(response.status, dict(response.headers), await response.read())

    async def ask_both(self, body: Any, path: str = COMPLETIONS) -> tuple[Reply, Reply]:
        """The proxy's answer, and one server's."""
        alone = f"http://127.0.0.1:{self.alone.port}"
        headers = {"X-Request-Id": "same"}
        return (
            await self.ask(body, path, headers=headers),
            await self.ask(body, path, url=alone, headers=headers),
        )

    async def get(self, path: str) -> Reply:
        async with self.session.get(self.url + path) as response:
            return Reply(response.status, dict(response.headers), await response.read())

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        page = (await self.get("/metrics")).body.decode()
        return sum(
            float(line.rpartition(" ")[2])
            for line in page.splitlines()
            if line.partition("{")[0].partition(" ")[0] == name and all(w in line for w in wanted)
        )

    async def settled(self, within_s: float = 20.0) -> None:
        """Nothing is left of any request; fails where something stays."""
        engines = [*self.prefill, *self.decode]
        await until(lambda: not any(engine.num_active for engine in engines), within_s)
        await until_true(self._has_no_load, within_s)

    async def drained(self) -> None:
        """No KV lies in a decode engine's buffer any more (lmcache)."""
        await until(lambda: not self.wire.buffered)

    async def _has_no_load(self) -> bool:
        names = ("kvxfer_proxy_engine_tokens", "kvxfer_proxy_engine_requests")
        loads = [await self.metric(name) for name in (*names, "kvxfer_proxy_requests_running")]
        return loads == [0.0, 0.0, 0.0]


@asynccontextmanager
async def serving(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    tp_size: int = 1,
    limits: Limits = LIMITS,
    **options: Any,
) -> AsyncIterator[Setup]:
    """Engines and a proxy in front of them."""
    wire = Wire(num_notices=tp_size)
    prefill = [Engine(wire) for _ in range(num_prefill)]
    decode = [Engine(wire) for _ in range(num_decode)]
    alone = Engine()
    notice_port = free_port()
    if options.get("connector", "").startswith("lmcache"):
        wire.notice_url = f"tcp://127.0.0.1:{notice_port}"
    async with AsyncExitStack() as stack:
        for engine in (*prefill, *decode, alone):
            await stack.enter_async_context(engine.running())
        addresses = [EngineAddress("prefill", "127.0.0.1", engine.port) for engine in prefill]
        for index, engine in enumerate(decode):
            channels = tuple(
                Channels("127.0.0.1", init_port, init_port + ALLOC_ABOVE)
                for init_port in range(INIT_PORT + 10 * index, INIT_PORT + 10 * index + tp_size)
            )
            addresses.append(EngineAddress("decode", "127.0.0.1", engine.port, channels))
        told = ProxyOptions(
            engines=tuple(addresses), port=0, notice_port=notice_port, limits=limits, **options
        )
        url = await stack.enter_async_context(proxy(told))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S))
        )
        yield Setup(url, prefill, decode, alone, wire, session, told)


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine, bounded in time."""
    asyncio.run(asyncio.wait_for(test, LIMIT_S))


async def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Wait for something; an AssertionError where it does not come."""

    async def asked() -> bool:
        return bool(condition())

    await until_true(asked, within_s)


async def until_true(condition: Callable[[], Awaitable[bool]], within_s: float = 20.0) -> None:
    end_s = asyncio.get_running_loop().time() + within_s
    while not await condition():
        assert asyncio.get_running_loop().time() < end_s, "it did not happen in time"
        await asyncio.sleep(0.01)
