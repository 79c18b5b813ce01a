"""An engine that behaves as vLLM's server does, with a model of letters and pages that are counted.

It streams, counts usage, ends a request whose client has gone, and hands KV over as kvxfer's,
NIXL's or LMCache's connector would: a hand-over is an entry of a `Wire` that both engines share.
"""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web
from fake_engine_answers import Answers
from fake_engine_model import (
    MAX_MODEL_LEN,
    Refused,
    Step,
    chat_text,
    check,
    generate,
    max_tokens_of,
    prompts_of,
    tokenize,
)
from free_ports import free_port

WAIT_S = 60.0
_FAILS_AT = 3  # steps, where an answer breaks off
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass
class Wire:
    """What lies between engines.

    Attributes:
        pushed: transfer id -> set once its prefill is done (kvxfer).
        kept: pages that a prefill engine keeps until they are fetched (nixl).
        buffered: tokens whose KV lies at a decode engine until it is looked up (lmcache).
        missed: lookups that found nothing.
    """

    pushed: dict[str, asyncio.Event] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    buffered: list[tuple[int, ...]] = field(default_factory=list)
    missed: int = 0
    notice_url: str = ""
    num_notices: int = 1

    def push(self, transfer_id: str) -> asyncio.Event:
        return self.pushed.setdefault(transfer_id, asyncio.Event())


@dataclass
class Seen:
    """A request that came."""

    path: str
    body: dict[str, Any]
    raw: bytes
    headers: dict[str, str]


@dataclass
class Engine:
    """One server; its fields may be changed while it runs."""

    wire: Wire = field(default_factory=Wire)
    prefill_s: float = 0.0
    held: asyncio.Event | None = None  # a prompt's work takes until it is set
    step_s: float = 0.0
    refusal: tuple[int, bytes] | None = None  # of every completion
    dies_after: int | None = None  # steps
    dies_at_once: bool = False
    breaks_off: bool = False  # amid its answer
    breaks_chunk: bool = False  # amid its answer comes what is no HTTP
    fails_after: int | None = None  # steps; an event says so
    health: int = 200
    health_s: float = 0.0
    answer_s: float = 0.0  # until an answer whose work is done
    answer_held: asyncio.Event | None = None  # the same, until it is set
    tokenize_held: asyncio.Event | None = None
    max_model_len: int = MAX_MODEL_LEN
    tokens_per_chunk: int = 1
    line_end: bytes = b"\n"  # of a stream
    bytewise: bool = False
    pace: asyncio.Semaphore | None = None  # one release, one chunk
    padding: str = ""  # in every chunk
    seen: list[Seen] = field(default_factory=list)
    queries: dict[str, str] = field(default_factory=dict)  # of who asked for the models last
    num_active: int = 0
    num_aborted: int = 0
    num_written: int = 0
    num_probes: int = 0
    port: int = 0
    runner: web.AppRunner | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Engine"]:
        app = web.Application(client_max_size=64 << 20)
        for path in (COMPLETIONS, CHAT):
            app.router.add_post(path, self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        self.runner = runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        self.port = self.port or free_port()  # which it has again once it is back
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        try:
            yield self
        finally:
            await self.stop()

    async def stop(self) -> None:
        """End as a program does; `running` starts it again at its port."""
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _health(self, _: web.Request) -> web.Response:
        self.num_probes += 1
        await asyncio.sleep(self.health_s)
        return web.Response(status=self.health)

    async def _models(self, request: web.Request) -> web.Response:
        await self._note(request)
        self.queries = dict(request.query)
        return web.json_response({"object": "list", "data": [{"id": "letters"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = (await self._note(request)).body
        if self.tokenize_held is not None:
            await self.tokenize_held.wait()
        text = body["prompt"] if "prompt" in body else chat_text(body["messages"])
        tokens = tokenize(text)
        return web.json_response(
            {"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens}
        )

    async def _note(self, request: web.Request) -> Seen:
        raw = await request.read()
        try:
            body = json.loads(raw) if raw else {}
        except ValueError:
            body = {}
        self.seen.append(Seen(request.path, body, raw, dict(request.headers)))
        return self.seen[-1]

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        seen = await self._note(request)
        if self.dies_at_once:
            _die(request)
        if self.refusal is not None:
            status, text = self.refusal
            return web.Response(
                status=status, body=text, headers={"Content-Type": "application/json", "X-Own": "1"}
            )
        self.num_active += 1
        try:
            return await self._generate(request, seen.body, request.path == CHAT)
        except Refused as error:
            shape = {"message": str(error), "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response({"error": shape}, status=400)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        finally:
            self.num_active -= 1

    async def _generate(
        self, request: web.Request, body: dict[str, Any], is_chat: bool
    ) -> web.StreamResponse:
        prompts = prompts_of(body, is_chat)
        num_prompt = sum(map(len, prompts))
        max_tokens = max_tokens_of(body, is_chat, self.max_model_len - max(map(len, prompts)))
        check(body, max_tokens)
        request_id = request.headers.get("X-Request-Id") or str(time.monotonic_ns())
        answers = Answers(request_id, int(time.time()), body, is_chat)
        num_each = body.get("n") or 1
        outputs = [
            list(generate(prompt, body, max_tokens, row * num_each + child))
            for row, prompt in enumerate(prompts)
            for child in range(num_each)
        ]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        if body.get("stream"):
            await response.prepare(request)
        kv_params = await self._hand_over(body, prompts[0], outputs[0][0].token)
        if not body.get("stream"):
            whole = answers.whole(list(itertools.chain(*outputs)), num_prompt, kv_params)
            return await self._whole(request, whole, max(map(len, outputs)))
        for chunk in answers.opening(len(outputs), num_prompt):
            await self._send(response, chunk)
        for num_done, (steps, count) in enumerate(self._chunks(outputs)):
            await self._fail(request, response, num_done)
            if num_done == self.fails_after:
                await self._send(response, {"error": {"message": "no KV", "code": 500}})
                break
            await asyncio.sleep(self.step_s)
            if self.pace is not None:
                await self.pace.acquire()
            await self._send(response, answers.chunk(steps, num_prompt, count))
        for chunk in answers.closing(num_prompt, sum(map(len, outputs))):
            await self._send(response, chunk)
        await self._write(response, b"data: [DONE]" + 2 * self.line_end)
        await response.write_eof()
        return response

    async def _whole(
        self, request: web.Request, answer: dict[str, Any], num_steps: int
    ) -> web.StreamResponse:
        await asyncio.sleep(self.step_s * num_steps)
        await asyncio.sleep(self.answer_s)
        if self.answer_held is not None:
            await self.answer_held.wait()
        if self.dies_after is not None:
            _die(request)
        if self.breaks_off or self.breaks_chunk:
            length = {"Content-Length": "1000"} if self.breaks_off else None
            response = web.StreamResponse(headers=length)
            await response.prepare(request)
            await self._fail(request, response, _FAILS_AT)
        return web.json_response(answer)

    async def _fail(
        self, request: web.Request, response: web.StreamResponse, num_done: int
    ) -> None:
        """What goes wrong amid an answer."""
        if num_done == self.dies_after:
            _die(request)
        if self.breaks_off and num_done == _FAILS_AT:
            await response.write(b'data: {"id": ')
            await asyncio.sleep(0.1)  # so that it is not lost with the connection
            _die(request)
        if self.breaks_chunk and num_done == _FAILS_AT:
            assert request.transport is not None
            await response.write(b"data: {}\n\n")
            await asyncio.sleep(0.1)  # so that it does not come with what was before
            request.transport.write(b"ZZ!\r\n")
            await asyncio.sleep(WAIT_S)

    def _chunks(self, outputs: list[list[Step]]) -> list[tuple[list[Step], int]]:
        size = self.tokens_per_chunk
        rounds = range(0, max(map(len, outputs)), size)
        return [
            (steps[start : start + size], min(start + size, len(steps)))
            for start in rounds
            for steps in outputs
            if start < len(steps)
        ]

    async def _send(self, response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        if self.padding:
            chunk = {**chunk, "padding": self.padding}
        await self._write(response, b"data: " + json.dumps(chunk).encode() + 2 * self.line_end)

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        pieces = [data[i : i + 1] for i in range(len(data))] if self.bytewise else [data]
        for piece in pieces:
            await response.write(piece)
            if self.bytewise:
                await asyncio.sleep(0)
        self.num_written += 1

    async def _hand_over(self, body: dict[str, Any], prompt: list[int], token: int) -> Any:
        """What the connector does between a prompt and its first token."""
        params = body.get("kv_transfer_params") or {}
        await asyncio.sleep(self.prefill_s)
        if self.held is not None:
            await self.held.wait()
        own = params.get("kvxfer")
        if own and own["role"] == "send":
            self.wire.push(own["transfer_id"]).set()
        elif own:
            await asyncio.wait_for(self.wire.push(own["transfer_id"]).wait(), WAIT_S)
            if self.wire.notice_url:
                self._look_up(prompt)
        elif params.get("do_remote_decode"):
            pages = f"pages-{time.monotonic_ns()}"
            self.wire.kept.add(pages)
            return {"do_remote_prefill": True, "remote_block_ids": [pages], "tp_size": 1}
        elif params.get("do_remote_prefill"):
            self.wire.kept.discard(params["remote_block_ids"][0])
        elif "disagg_spec" in params:
            self.wire.buffered.append(tuple(prompt))
            self.wire.push(params["disagg_spec"]["req_id"]).set()
            await self._notify(params["disagg_spec"]["req_id"])
            return {"first_tok": token}
        elif self.wire.notice_url:
            self._look_up(prompt[:-1])
        return None

    def _look_up(self, tokens: list[int]) -> None:
        if tuple(tokens) in self.wire.buffered:
            self.wire.buffered.remove(tuple(tokens))
        else:
            self.wire.missed += 1

    async def _notify(self, request_id: str) -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(self.wire.notice_url)
        for _ in range(self.wire.num_notices):
            await socket.send(msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": request_id}))
        context.destroy(linger=20_000)


def _die(request: web.Request) -> None:
    """End as a killed process does: its connection is reset."""
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError
