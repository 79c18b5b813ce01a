"""One request on its way through the proxy, and what a connector's mode does with it."""

import asyncio
import time
from collections.abc import Coroutine, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from kvxfer.pd.proxy.body import Body
from kvxfer.pd.proxy.engine import Engine, Load
from kvxfer.pd.proxy.failure import Failure
from kvxfer.pd.proxy.legs import Answer, Headers, Legs, Opened
from kvxfer.pd.proxy.metrics import Metrics
from kvxfer.pd.proxy.options import Limits
from kvxfer.pd.proxy.relay import Reply
from kvxfer.pd.proxy.rewriting import alone_body


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and the answer to it.

    Attributes:
        id: unique among all proxies and their restarts.
        path: where it came to.
        headers: what its legs carry, the client's among them.
        began_s: when, on the monotonic clock.
    """

    id: str
    path: str
    body: Body
    headers: Headers
    reply: Reply
    began_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Pair:
    """The engines of one request; ``load`` is that of its prefill."""

    prefill: Engine
    decode: Engine
    load: Load


class Mode(Protocol):
    """How the legs of a request are run for one connector."""

    def why_alone(self, body: Body) -> str | None:
        """Why a decode engine answers by itself; None where the request is split."""

    async def answer(self, exchange: Exchange, pair: Pair) -> None:
        """Answer a request with these engines.

        Raises:
            Unreachable: one takes no connection; where nothing has been sent to the client,
                others may be tried.
            Failure: anything else went wrong.
            ClientGone: the client did not wait.
        """

    async def close(self) -> None:
        """Let go of what it bound."""


class Background:
    """Work that no client waits for; each piece has a deadline, or ends with the proxy."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Tools:
    """What every mode works with."""

    legs: Legs
    limits: Limits
    metrics: Metrics
    background: Background = field(default_factory=Background)

    async def prefill(
        self, exchange: Exchange, pair: Pair, body: bytes, path: str | None = None
    ) -> Answer:
        """The whole answer of the prefill engine; with it, its load is over."""
        try:
            answer = await self.legs.ask(
                pair.prefill, path or exchange.path, body, exchange.headers
            )
        finally:
            pair.load.release()
        self.metrics.leg(pair.prefill, answer.status)
        self.metrics.prefill_s.observe(time.monotonic() - exchange.began_s)
        return answer

    async def decode(
        self, exchange: Exchange, engine: Engine, body: bytes, path: str | None = None
    ) -> Opened:
        """The answer of a decode engine, once its first bytes are here; to be closed."""
        opened = await self.legs.open(engine, path or exchange.path, body, exchange.headers)
        self.metrics.leg(engine, opened.status)
        self.metrics.first_byte_s.observe(time.monotonic() - exchange.began_s)
        return opened

    async def alone(self, exchange: Exchange, engine: Engine) -> None:
        """Answer with a decode engine that gets no KV."""
        body = alone_body(exchange.body)
        with closing(await self.decode(exchange, engine, body)) as opened:
            await exchange.reply.relay(opened)

    async def discard(self, engines: Iterable[Engine], fields: dict[str, Any]) -> None:
        """Take KV that nobody wants any more off its engines, by asking for a token of it.

        A connector that keeps KV until it is fetched has no other way to be rid of it soon.

        Args:
            engines: decode engines; the first that does it is enough.
            fields: of a request that fetches the KV.
        """
        body = msgspec.json.encode({**fields, "max_tokens": 1, "stream": False})
        outcome = "kept"
        for engine in engines:
            try:
                answer = await self.legs.ask(
                    engine, "/v1/completions", body, timeout_s=self.limits.discard_s
                )
            except Failure:
                continue
            if answer.status == 200:
                outcome = "taken"
                break
        self.metrics.discarded.add(outcome)
