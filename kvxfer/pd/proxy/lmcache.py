"""LMCache's PD backend: prefill, a notice from each rank that KV has arrived, then the decode.

The decode's prompt is the client's and the first token, which the prefill has made: an engine that
is set up for LMCache looks its KV up by all tokens but the last. (LMCache,
``disagg_proxy_server.py``.)
"""

from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

from kvxfer.errors import ProtocolMismatch
from kvxfer.pd.proxy.body import Body, write_body
from kvxfer.pd.proxy.continuation import ChatContinuation, Continuation
from kvxfer.pd.proxy.engine import Engine
from kvxfer.pd.proxy.exchange import Exchange, Pair, Tools
from kvxfer.pd.proxy.failure import Failure, LegFailed, Unreachable
from kvxfer.pd.proxy.legs import Answer, Opened
from kvxfer.pd.proxy.lmcache_body import (
    decode_leg,
    disagg_spec,
    max_tokens,
    prefill_leg,
    tokenize_fields,
    why_not_continued,
)
from kvxfer.pd.proxy.notices import Arrival, Notices
from kvxfer.pd.proxy.relay import DONE, JSON, Reply
from kvxfer.pd.proxy.sse import EventReader, event

_PATH: Final = "/v1/completions"
_ANY_TOKEN: Final = 0  # the last of a prompt is not looked up
_chunk = msgspec.json.Decoder(dict[str, Any])
_STREAM: Final = ("Content-Type", "text/event-stream; charset=utf-8")


class _Tokens(msgspec.Struct):
    """What ``/tokenize`` says."""

    tokens: list[int]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Its token ids, and how many tokens may follow."""

    tokens: list[int]
    max_tokens: int


class _FirstToken(msgspec.Struct):
    first_tok: int


class _Choice(msgspec.Struct):
    text: str
    finish_reason: str | None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Completion(msgspec.Struct):
    """What there must be of one, of either leg."""

    id: str
    created: int
    model: str
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: _Usage


class _Prefilled(_Completion):
    kv_transfer_params: _FirstToken


class _Options(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


@dataclass(slots=True)
class _HandOver:
    """KV on its way.

    Attributes:
        tokens: whose it is.
        arrival: of notices that it is there.
        may_lie: whether a decode engine may keep it until somebody looks it up.
    """

    tokens: list[int]
    arrival: Arrival
    may_lie: bool = True


class LMCache:
    """The mode of ``--connector lmcache``."""

    def __init__(self, tools: Tools, notices: Notices) -> None:
        self._tools = tools
        self._notices = notices

    def why_alone(self, body: Body) -> str | None:
        """As `Mode`."""
        return why_not_continued(body)

    async def answer(self, exchange: Exchange, pair: Pair) -> None:
        """As `Mode`."""
        prompt = await self._prompt(exchange, pair)
        if prompt is None:
            return
        if prompt.max_tokens < 2:  # known only now: a chat that names no limit
            pair.load.release()
            self._tools.metrics.alone.add("one_token")
            await self._tools.alone(exchange, pair.decode)
            return
        arrival = self._notices.expect(exchange.id, len(pair.decode.address.channels))
        hand_over = _HandOver(prompt.tokens, arrival)
        try:
            await self._in_two_legs(exchange, pair, prompt, hand_over)
        finally:
            if hand_over.may_lie:
                self._tools.background.run(self._discard(exchange, pair, hand_over))
            else:
                arrival.close()

    async def _in_two_legs(
        self, exchange: Exchange, pair: Pair, prompt: _Prompt, hand_over: _HandOver
    ) -> None:
        prefilled = await self._prefill(exchange, pair, hand_over)
        if prefilled is None:
            return
        first, answer = prefilled
        if exchange.body.flag("stream"):
            await exchange.reply.begin(200, [_STREAM])
            await exchange.reply.write(_events(answer.opening()))
        if answer.has_stopped:
            await _finish(exchange, answer, None)
            return
        await self._arrived(pair, hand_over.arrival)
        leg = decode_leg(exchange.body, [*prompt.tokens, first], prompt.max_tokens - 1)
        with closing(
            await self._tools.decode(exchange, pair.decode, write_body(leg), _PATH)
        ) as opened:
            hand_over.may_lie = opened.status != 200
            await _go_on(exchange, answer, opened)

    async def close(self) -> None:
        """As `Mode`."""
        await self._notices.close()

    async def _prompt(self, exchange: Exchange, pair: Pair) -> _Prompt | None:
        """The prompt's token ids; None where the client has been told why there are none."""
        prompt, asked = exchange.body.prompt(), max_tokens(exchange.body)
        if prompt.is_exact and asked is not None:
            try:
                return _Prompt(msgspec.json.decode(prompt.text, type=list[int]), asked)
            except msgspec.MsgspecError as error:
                raise Failure(400, f"prompt is not a list of token ids: {error}") from error
        answer = await self._tools.legs.ask(
            pair.prefill, "/tokenize", write_body(tokenize_fields(exchange.body)), exchange.headers
        )
        if answer.status != 200:
            await exchange.reply.whole(answer)
            return None
        found: _Tokens = _read(pair.prefill, answer, _Tokens)
        room = found.max_model_len - len(found.tokens)
        return _Prompt(found.tokens, room if asked is None else asked)

    async def _prefill(
        self, exchange: Exchange, pair: Pair, hand_over: _HandOver
    ) -> tuple[int, Continuation] | None:
        """The first token and the answer so far; None where the client has a refusal."""
        spec = disagg_spec(exchange.id, pair.decode.address)
        params = {"ret_first_tok": True, "disagg_spec": spec}
        body = write_body(prefill_leg(exchange.body, hand_over.tokens, params))
        try:
            answer = await self._tools.prefill(exchange, pair, body, _PATH)
        except Unreachable:
            hand_over.may_lie = False
            raise
        if answer.status != 200:
            hand_over.may_lie = False
            await exchange.reply.whole(answer)
            return None
        first: _Prefilled = _read(pair.prefill, answer, _Prefilled)
        return first.kv_transfer_params.first_tok, _continuation(exchange.body, answer)

    async def _arrived(self, pair: Pair, arrival: Arrival) -> None:
        limit_s = self._tools.limits.notice_s
        if not await arrival.wait(limit_s):
            raise LegFailed(
                pair.prefill,
                f"not all of its ranks have said within {limit_s:g} s that KV has arrived; "
                "pd_proxy_host and pd_proxy_port must name this proxy",
                504,
            )

    async def _discard(self, exchange: Exchange, pair: Pair, hand_over: _HandOver) -> None:
        # A prefill that was broken off may have sent some of its KV, and gives no notice.
        with closing(hand_over.arrival):
            await hand_over.arrival.wait(self._tools.limits.notice_s)
        prompt = [*hand_over.tokens, _ANY_TOKEN]
        model = exchange.body.fields.get("model", msgspec.Raw(b"null"))
        await self._tools.discard([pair.decode], {"model": model, "prompt": prompt})


def _continuation(body: Body, prefilled: Answer) -> Continuation:
    options = _stream_options(body)
    kind = ChatContinuation if body.is_chat else Continuation
    return kind(
        msgspec.json.decode(prefilled.body),
        with_usage=bool(options.include_usage),
        always_usage=bool(options.continuous_usage_stats),
    )


def _stream_options(body: Body) -> _Options:
    if not body.has("stream_options"):
        return _Options()
    try:
        return msgspec.json.decode(body.fields["stream_options"], type=_Options)
    except msgspec.MsgspecError:
        return _Options()  # the decode engine refuses them


async def _go_on(exchange: Exchange, answer: Continuation, opened: Opened) -> None:
    if opened.status != 200 and not exchange.reply.has_begun:
        await exchange.reply.relay(opened)
    elif opened.status != 200:
        refusal = await opened.whole()
        text = refusal.body.decode(errors="replace")
        raise LegFailed(opened.engine, f"refused to go on ({refusal.status}): {text}")
    elif exchange.reply.has_begun:
        await _stream(exchange.reply, answer, opened)
    else:
        decoded = await opened.whole()
        _read(opened.engine, decoded, _Completion)
        await _finish(exchange, answer, msgspec.json.decode(decoded.body))


async def _finish(exchange: Exchange, answer: Continuation, decoded: Any) -> None:
    """The end of a stream that has stopped, or an answer that is not streamed."""
    if exchange.reply.has_begun:
        await exchange.reply.write(DONE)
        await exchange.reply.end()
        return
    body = msgspec.json.encode(answer.whole(decoded))
    await exchange.reply.whole(Answer(200, [JSON], body))


async def _stream(reply: Reply, answer: Continuation, opened: Opened) -> None:
    reader = EventReader()
    async for part in opened.parts():
        try:
            events = list(reader.feed(part))
            chunks = [_chunk.decode(it) for it in events if it != b"[DONE]"]
            told = _events([it if it.get("error") else answer.next(it) for it in chunks])
        except (msgspec.MsgspecError, ProtocolMismatch, KeyError, TypeError) as error:
            raise LegFailed(opened.engine, f"sent what is no completion: {error!r}") from error
        if b"[DONE]" in events:
            await reply.write(told + DONE)
            await reply.end()
            return
        if told:
            await reply.write(told)
    raise LegFailed(opened.engine, "ended its stream before [DONE]")


def _events(chunks: list[dict[str, Any]]) -> bytes:
    return b"".join(event(msgspec.json.encode(chunk)) for chunk in chunks)


def _read(engine: Engine, answer: Answer, kind: Any) -> Any:
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LegFailed(
            engine, f"answered what LMCache's hand-over does not expect: {error}"
        ) from error
