"""The HTTP server: what a client may ask, who answers, and what it is told when that fails."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing
from typing import Any, Final

import msgspec
from aiohttp import ClientError, web

from kvxfer.pd.proxy.body import Body, read_body
from kvxfer.pd.proxy.engine import Engine
from kvxfer.pd.proxy.exchange import Exchange, Mode, Pair, Tools
from kvxfer.pd.proxy.failure import Failure, LegFailed, Unreachable, error_body
from kvxfer.pd.proxy.options import ProxyOptions, Role
from kvxfer.pd.proxy.patience import Patience
from kvxfer.pd.proxy.prometheus import CONTENT_TYPE
from kvxfer.pd.proxy.relay import JSON, ClientGone, Reply
from kvxfer.pd.proxy.routing import Router, output_tokens, prompt_of
from kvxfer.pd.proxy.timing import AnswerTimes

_log = logging.getLogger(__name__)

COMPLETIONS: Final = ("/v1/completions", "/v1/chat/completions")
# Any decode engine answers these as one server would.
RELAYED: Final = ("/v1/models", "/version", "/tokenize", "/detokenize")
DECODE: Final[tuple[Role, ...]] = ("decode",)
SPLIT: Final[tuple[Role, ...]] = ("prefill", "decode")
_GONE: Final = 499  # in the metrics alone: nobody was told a status

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Proxy:
    """Handles requests; what it works with is made and ended by `kvxfer.pd.proxy.run`."""

    def __init__(
        self, options: ProxyOptions, engines: list[Engine], tools: Tools, mode: Mode
    ) -> None:
        self._limits = options.limits
        self._engines = engines
        self._router = Router(engines, options.routing)
        self._tools = tools
        self._mode = mode

    def app(self, patience: Patience) -> web.Application:
        """All routes."""
        app = web.Application(
            middlewares=[patience.middleware, _in_openai_shape],
            client_max_size=self._limits.body_bytes,
        )
        for path in COMPLETIONS:
            app.router.add_post(path, self._complete)
        for path in RELAYED:
            app.router.add_get(path, self._relay)  # and HEAD
            app.router.add_post(path, self._relay)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        metrics = self._tools.metrics
        times = AnswerTimes(metrics)
        reply = Reply(request, times.see)
        metrics.num_running += 1
        status = _GONE
        try:
            status = await self._settle(request, reply, self._answer(request, reply, times))
            if status == 200 and times.error_status is not None:
                status = times.error_status
        finally:
            metrics.num_running -= 1
            metrics.requests.add(request.path, str(status))
            if status in (200, _GONE):
                times.end(is_whole=status == 200)
        return reply.result()

    async def _settle(
        self, request: web.Request, reply: Reply, answering: Coroutine[Any, Any, None]
    ) -> int:
        """Wait for an answer, and tell the client of what fails; returns the status."""
        status = _GONE
        try:
            await answering
            status = reply.response.status
        except ClientGone:
            reply.break_off()
        except Failure as failure:
            status = failure.status
            await self._say(reply, failure)
        except Exception:
            status = 500
            _log.exception("%s %s", request.method, request.path)
            await self._say(reply, Failure(status, "the proxy failed; its log says how"))
        finally:
            if status == _GONE:
                self._tools.metrics.gone.add()
        return status

    async def _answer(self, request: web.Request, reply: Reply, times: AnswerTimes) -> None:
        raw = await self._read(request)
        body = read_body(raw, is_chat=request.path == COMPLETIONS[1])
        times.prompt = prompt_of(body)
        reason = self._mode.why_alone(body)
        if reason is not None:
            self._tools.metrics.alone.add(reason)
        # Each try marks an engine down, so the tries end; unless one comes and goes meanwhile.
        for num_left in reversed(range(len(self._engines) + 1)):
            try:
                return await self._try(request, body, reply, is_split=reason is None)
            except Unreachable as error:
                error.engine.suspect(str(error))
                self._count(error)
                if reply.has_begun or num_left == 0:
                    raise
                self._tools.metrics.retries.add()

    async def _try(self, request: web.Request, body: Body, reply: Reply, *, is_split: bool) -> None:
        """Answer with engines that are up now; each try has an id of its own."""
        exchange_id = uuid.uuid4().hex
        headers = self._tools.legs.headers_for(request.headers, exchange_id)
        exchange = Exchange(exchange_id, request.path, body, headers, reply)
        chosen = self._router.choose(body, SPLIT if is_split else DECODE)
        num_prompt = prompt_of(body).num_tokens
        with chosen["decode"].carry(num_prompt + output_tokens(body)):
            if not is_split:
                return await self._tools.alone(exchange, chosen["decode"])
            with chosen["prefill"].carry(num_prompt) as load:
                pair = Pair(chosen["prefill"], chosen["decode"], load)
                return await self._mode.answer(exchange, pair)

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        reply = Reply(request)
        await self._settle(request, reply, self._pass_on(request, reply))
        return reply.result()

    async def _pass_on(self, request: web.Request, reply: Reply) -> None:
        """Pass a small request on to a decode engine."""
        raw = await self._read(request) if request.method == "POST" else None
        headers = self._tools.legs.headers_for(request.headers, uuid.uuid4().hex)
        nothing = Body(raw or b"", {}, is_chat=False)
        engine = self._router.choose(nothing, DECODE)["decode"]
        try:
            with closing(
                await self._tools.legs.open(engine, request.path_qs, raw, headers)
            ) as opened:
                await reply.relay(opened)
        except Unreachable as error:
            engine.suspect(str(error))
            raise

    async def _read(self, request: web.Request) -> bytes:
        """A request's body.

        Raises:
            Failure: it is too large, too late, or broken.
            ClientGone: the client left amid it.
        """
        limit = self._limits.body_bytes
        too_large = Failure(413, f"the body is above {limit} bytes; the proxy takes no more")
        if (request.content_length or 0) > limit:
            raise too_large
        try:
            return await asyncio.wait_for(request.read(), self._limits.body_s)
        except asyncio.TimeoutError as error:
            raise Failure(
                408, f"the body did not arrive within {self._limits.body_s:g} s"
            ) from error
        except web.HTTPRequestEntityTooLarge as error:
            raise too_large from error
        except web.RequestPayloadError as error:
            raise Failure(400, f"the body is no HTTP: {error}") from error
        except (OSError, ClientError) as error:
            raise ClientGone from error

    async def _say(self, reply: Reply, failure: Failure) -> None:
        if isinstance(failure, LegFailed) and not isinstance(failure, Unreachable):
            self._count(failure)
        try:
            await reply.fail(failure)
        except ClientGone:
            reply.break_off()

    def _count(self, failure: LegFailed) -> None:
        kind = "unreachable" if isinstance(failure, Unreachable) else "failed"
        self._tools.metrics.leg(failure.engine, kind)
        _log.warning("%s", failure)

    async def _health(self, _: web.Request) -> web.Response:
        """200 where every engine is up, else 503; which ones, and why not."""
        return self._state(all(engine.is_up for engine in self._engines))

    async def _ready(self, _: web.Request) -> web.Response:
        """200 where requests can be answered: an engine of each role is up."""
        return self._state(
            all(
                any(engine.is_up for engine in self._engines if engine.role == role)
                for role in SPLIT
            )
        )

    def _state(self, is_good: bool) -> web.Response:
        engines = [
            {"role": engine.role, "engine": engine.name, "down": engine.down_reason or None}
            for engine in self._engines
        ]
        body = msgspec.json.encode({"status": "ok" if is_good else "down", "engines": engines})
        return web.Response(status=200 if is_good else 503, body=body, headers=[JSON])

    async def _metrics(self, _: web.Request) -> web.Response:
        page = self._tools.metrics.page().encode()
        return web.Response(body=page, headers=[("Content-Type", CONTENT_TYPE)])


@web.middleware
async def _in_openai_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors that are nobody's answer yet, as a client of OpenAI's API reads them."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        headers = [JSON, *((name, it) for name, it in error.headers.items() if name == "Allow")]
        return web.Response(
            status=error.status, body=error_body(error.status, message), headers=headers
        )
