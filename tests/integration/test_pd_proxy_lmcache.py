"""The proxy in front of LMCache's hand-over: two legs after one another, and still one server."""

import asyncio
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from fake_engine_model import EOS, chat_text, generate, tokenize
from pd_proxies import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PROMPT,
    STREAMS,
    Setup,
    answer_of,
    run,
    serving,
    until_true,
)

# To the model of letters, of which the first token here is its end of text.
STOPS_AT_ONCE = [{"role": "user", "content": "how many pages has a book"}]


def first_is(token: int) -> list[int]:
    """A prompt whose first output is this token."""
    for last in range(1, 120):
        prompt = [*PROMPT, last]
        if next(iter(generate(prompt, {}, 9, 0))).token == token:
            return prompt
    raise AssertionError("no such prompt")


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tokens": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 8}),
    "text": (COMPLETIONS, {"prompt": "once upon a time", "max_tokens": 8}),
    "no_max_tokens": (COMPLETIONS, {"prompt": PROMPT}),
    "two_tokens": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2}),
    "eos_later": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 500}),
    "eos_at_once": (COMPLETIONS, {"prompt": first_is(EOS), "max_tokens": 50}),
    "no_eos_yet": (COMPLETIONS, {"prompt": first_is(EOS), "max_tokens": 50, "min_tokens": 1}),
    "min_tokens": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 60, "min_tokens": 50}),
    "ignore_eos": (COMPLETIONS, {"prompt": first_is(EOS), "max_tokens": 9, "ignore_eos": True}),
    "stop_at_once": (COMPLETIONS, {"prompt": first_is(ord("q")), "max_tokens": 9, "stop": "q"}),
    "stop_later": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 200, "stop": ["a", "e"]}),
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 8}),
    "chat_newer_field": (CHAT, {"messages": MESSAGES, "max_completion_tokens": 8}),
    "chat_no_limit": (CHAT, {"messages": MESSAGES}),  # 31 tokens: more than a completion's default
    "chat_null_limit": (CHAT, {"messages": MESSAGES, "max_tokens": None}),
    "chat_eos_at_once": (CHAT, {"messages": STOPS_AT_ONCE}),
}


@pytest.mark.parametrize("how", STREAMS)
@pytest.mark.parametrize("name", BODIES)
def test_a_client_sees_one_server(name: str, how: str) -> None:
    async def test() -> None:
        path, fields = BODIES[name]
        async with serving(connector="lmcache", tp_size=2) as setup:
            ours, alone = await setup.ask_both({"model": "m", **fields, **STREAMS[how]}, path)
            assert answer_of(ours) == answer_of(alone)
            assert len({chunk["id"] for chunk in answer_of(ours) if chunk != "[DONE]"}) == 1
            assert "disagg_spec" in setup.prefill[0].seen[-1].body["kv_transfer_params"]
            await setup.drained()
            assert setup.wire.missed == 0
            await setup.settled()

    run(test())


EXACT_ALONE = {
    "several_outputs": {"n": 2},
    "one_token": {"max_tokens": 1},
    "null_max_tokens": {"max_tokens": None},
    "stream_options": {"stream_options": {"include_usage": True}},
    "seed": {"seed": 3, "temperature": 0.7},
    "stop": {"stop": ["ab"]},
    "not_continued": {"frequency_penalty": 1.5},
    "unclear_stop": {"stop": 5},
}


@pytest.mark.parametrize("reason", EXACT_ALONE)
def test_what_two_legs_cannot_answer_alike_is_not_split(reason: str) -> None:
    async def test() -> None:
        async with serving(connector="lmcache") as setup:
            setup.decode[0].refusal = (418, b"seen")
            body = {"prompt": PROMPT, "max_tokens": 9, **EXACT_ALONE[reason]}
            assert (await setup.ask(body)).status == 418
            assert not setup.prefill[0].seen
            assert await setup.metric("kvxfer_proxy_alone_total", reason=reason) == 1

    run(test())


@pytest.mark.parametrize("room", [1, 2, 24])
def test_a_chat_without_a_limit_fills_the_model_s_room(room: int) -> None:
    async def test() -> None:
        async with serving(connector="lmcache") as setup:
            for engine in (*setup.prefill, *setup.decode, setup.alone):
                engine.max_model_len = len(tokenize(chat_text(MESSAGES))) + room
            ours, alone = await setup.ask_both({"messages": MESSAGES, "ignore_eos": True}, CHAT)
            assert answer_of(ours) == answer_of(alone)
            assert ours.json["usage"]["completion_tokens"] == room
            # A second token is what a second leg is for.
            assert (await setup.metric("kvxfer_proxy_alone_total", reason="one_token")) == (
                room == 1
            )
            await setup.drained()
            await setup.settled()

    run(test())


def test_a_chat_with_an_image_is_not_split() -> None:
    async def test() -> None:
        async with serving(connector="lmcache") as setup:
            setup.decode[0].refusal = (418, b"seen")
            content = [{"type": "image_url", "image_url": {"url": "data:"}}]
            body = {"messages": [{"role": "user", "content": content}]}
            assert (await setup.ask(body, CHAT)).status == 418
            assert await setup.metric("kvxfer_proxy_alone_total", reason="not_text") == 1

    run(test())


def test_what_a_whole_output_stands_for_does_not_change_it() -> None:
    async def test() -> None:
        body = {"prompt": PROMPT, "max_tokens": 30, "frequency_penalty": 1.5}
        async with serving(connector="lmcache") as setup:
            ours, alone = await setup.ask_both(body)
            assert answer_of(ours) == answer_of(alone)
            # Split, it would be another text: the first token would count as the prompt's.
            first, *rest = generate(PROMPT, body, 30, 0)
            again = generate([*PROMPT, first.token], body, 29, 0)
            assert [step.token for step in again] != [step.token for step in rest]

    run(test())


def test_the_legs_are_those_of_lmcache_s_protocol() -> None:
    async def test() -> None:
        async with serving(connector="lmcache", tp_size=2) as setup:
            await setup.ask({"prompt": "once upon", "max_tokens": 9, "min_tokens": 4, "top_k": 3})
            tokenized, prefill = setup.prefill[0].seen
            (decode,) = setup.decode[0].seen
            assert tokenized.path == "/tokenize"
            params = prefill.body.pop("kv_transfer_params")
            assert params["ret_first_tok"] is True
            spec = params["disagg_spec"]
            assert len(spec.pop("req_id")) == 32
            assert spec == {
                "receiver_host": "127.0.0.1",
                "receiver_init_port": [2000, 2001],
                "receiver_alloc_port": [3000, 3001],
            }
            tokens = tokenize("once upon")
            shared = {"top_k": 3}
            assert prefill.body == {
                **shared, "prompt": tokens, "max_tokens": 1, "min_tokens": 1, "stream": False,
            }  # fmt: skip
            first = next(iter(generate(tokens, {}, 9, 0))).token
            assert decode.body == {
                **shared, "prompt": [*tokens, first], "max_tokens": 8, "min_tokens": 3,
                "stream": False,
            }  # fmt: skip

    run(test())


def test_the_decode_engine_s_events_may_come_in_pieces_of_any_size() -> None:
    async def test() -> None:
        async with serving(connector="lmcache") as setup:
            setup.decode[0].bytewise = True
            body = {
                "prompt": PROMPT, "max_tokens": 6, "stream": True, "ignore_eos": True,
                "stream_options": {"include_usage": True},
            }  # fmt: skip
            ours, alone = await setup.ask_both(body)
            assert answer_of(ours) == answer_of(alone)

    run(test())


def test_several_tokens_in_a_chunk_are_the_same_text() -> None:
    async def test() -> None:
        async with serving(connector="lmcache") as setup:
            setup.decode[0].tokens_per_chunk = 3
            body = {"prompt": PROMPT, "max_tokens": 9, "stream": True, "ignore_eos": True}
            ours, alone = await setup.ask_both(body)
            text, expected = (
                "".join(it["choices"][0]["text"] for it in reply.events[:-1])
                for reply in (ours, alone)
            )
            assert text == expected

    run(test())


def test_a_decode_engine_that_dies_ends_the_stream_with_an_error() -> None:
    async def test() -> None:
        async with serving(connector="lmcache") as setup:
            setup.decode[0].dies_after = 2
            body = {"prompt": PROMPT, "max_tokens": 9, "stream": True, "ignore_eos": True}
            *chunks, error, _ = (await setup.ask(body)).events
            assert len(chunks) == 3
            assert error["error"]["code"] == 502
            await setup.settled()

    run(test())


GARBAGE = [b"<html>", b"[]", b"{}", b'{"choices": []}', b"[" * 10_000]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda it: repr(it[:12]))
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_none_is_status_502(role: str, stream: bool, garbage: bytes) -> None:
    async def test() -> None:
        async with serving(connector="lmcache") as setup:
            getattr(setup, role)[0].refusal = (200, garbage)
            reply = await setup.ask({"prompt": PROMPT, "max_tokens": 9, "stream": stream})
            if role == "decode" and stream:
                assert reply.events[-2]["error"]["code"] == 502
            else:
                assert (reply.status, reply.json["error"]["code"]) == (502, 502)
            assert await setup.metric("kvxfer_proxy_requests_total", status="500") == 0
            await setup.settled()

    run(test())


EVENTS = [b"data: {}\n\n", b"data: nonsense\n\n", b'data: {"choices": 5}\n\n',
          b'data: {"choices": [{}]}\n\n', b'data: [1]\n\n',
          b'data: {"usage": {"x": 1}, "choices": []}\n\n']  # fmt: skip


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_of_nonsense_ends_with_an_error(path: str, event: bytes) -> None:
    async def test() -> None:
        async with serving(connector="lmcache") as setup:
            setup.decode[0].refusal = (200, event)
            prompt: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": PROMPT}
            reply = await setup.ask({**prompt, "max_tokens": 9, "stream": True}, path)
            assert reply.events[-2]["error"]["code"] == 502
            assert await setup.metric("kvxfer_proxy_requests_total", status="500") == 0
            await setup.settled()

    run(test())


def test_strange_notices_do_no_harm() -> None:
    frames = [b"", b"\xc1", b"x" * 1000, msgspec.msgpack.encode({"type": "CancelNotif"}),
              msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": "somebody"}),
              b"\x91" * 5000]  # fmt: skip

    async def test() -> None:
        async with serving(connector="lmcache") as setup:
            context = zmq.asyncio.Context()
            with context.socket(zmq.PUSH) as socket:
                socket.connect(setup.wire.notice_url)
                await socket.send_multipart(frames)
                for frame in frames:
                    await socket.send(frame)
                await until_true(lambda: were_counted(setup, 2 * len(frames)))
            context.destroy(linger=0)
            name = "kvxfer_proxy_notices_total"
            assert await setup.metric(name, outcome="unexpected") == 2
            assert (await setup.ask({"prompt": PROMPT, "max_tokens": 4})).status == 200
            assert await setup.metric(name, outcome="counted") == 1

    run(test())


async def were_counted(setup: Setup, count: int) -> bool:
    return await setup.metric("kvxfer_proxy_notices_total") == count


def test_two_proxies_never_give_one_id() -> None:
    async def ids() -> list[str]:
        async with serving(connector="lmcache") as setup:
            await asyncio.gather(*(setup.ask({"prompt": PROMPT}) for _ in range(20)))
            specs = [seen.body["kv_transfer_params"] for seen in setup.prefill[0].seen]
            return [spec["disagg_spec"]["req_id"] for spec in specs]

    async def test() -> None:
        assert len({*await ids(), *await ids()}) == 40

    run(test())
