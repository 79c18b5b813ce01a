"""What goes wrong behind the proxy or in front of it ends on both sides, and is told once."""

import asyncio
import errno
import json
import socket
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from fake_engine import Engine
from pd_proxies import CHAT, COMPLETIONS, LIMITS, PROMPT, Setup, run, serving, until, until_true

from kvxfer.pd.proxy import legs

LONG = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True}
REFUSAL = b'{"error": {"message": "no such model", "type": "NotFoundError", "code": 404}}'


async def gone(setup: Setup, *engines: Engine) -> None:
    """Both sides have ended the request, and it was seen as such."""
    await until(lambda: all(engine.num_aborted == 1 for engine in engines))
    await setup.settled()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_the_prefill_ends_both_legs(stream: bool) -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.prefill[0].prefill_s = 20.0
            asking = asyncio.ensure_future(setup.ask({**LONG, "stream": stream}))
            await until(lambda: setup.prefill[0].num_active and setup.decode[0].num_active)
            asking.cancel()
            await gone(setup, setup.prefill[0], setup.decode[0])
            assert await setup.metric("kvxfer_proxy_clients_gone_total") == 1

    run(test())


def test_a_client_that_leaves_during_the_decode_ends_it() -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.decode[0].step_s = 0.01
            async with setup.session.post(
                setup.url + COMPLETIONS, json={**LONG, "stream": True}
            ) as response:
                await response.content.readany()
            await gone(setup, setup.decode[0])

    run(test())


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_a_refusal_of_the_prefill_engine_is_passed_on_once(status: int) -> None:
    async def test() -> None:
        async with serving(2, 2) as setup:
            for engine in setup.prefill:
                engine.refusal = (status, REFUSAL)
            for engine in setup.decode:
                engine.prefill_s = 20.0
            reply = await setup.ask(LONG)
            assert (reply.status, reply.body, reply.headers["X-Own"]) == (status, REFUSAL, "1")
            assert sum(len(engine.seen) for engine in setup.prefill) == 1
            await setup.settled()
            assert sum(engine.num_aborted for engine in setup.decode) == 1
            assert await setup.metric("kvxfer_proxy_retries_total") == 0

    run(test())


def test_a_refusal_of_the_decode_engine_ends_the_prefill() -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.prefill[0].prefill_s = 20.0
            setup.decode[0].refusal = (404, REFUSAL)
            reply = await setup.ask({**LONG, "stream": True})
            assert (reply.status, reply.body) == (404, REFUSAL)
            await gone(setup, setup.prefill[0])

    run(test())


def test_where_both_refuse_the_client_reads_the_decode_engine_s_words() -> None:
    async def test() -> None:
        async with serving(limits=replace(LIMITS, refusal_s=60.0)) as setup:
            # 9,000 tokens do not fit; the prefill leg asks for one.
            body = {"prompt": PROMPT, "max_tokens": 9000}
            ours, alone = await setup.ask_both(body)
            assert (ours.status, ours.body) == (400, alone.body)
            setup.prefill[0].refusal = (400, REFUSAL)
            ours, alone = await setup.ask_both(body)
            assert (ours.status, ours.body) == (400, alone.body)
            await setup.settled()

    run(test())


def test_an_engine_that_takes_no_connection_is_left_out() -> None:
    async def test() -> None:
        async with serving(2, 2) as setup:
            # They were up a moment ago, and nobody has asked them since.
            await setup.prefill[0].stop()
            await setup.decode[1].stop()
            for _ in range(6):
                assert (await setup.ask({"prompt": PROMPT, "max_tokens": 2})).status == 200
            assert len(setup.prefill[1].seen) >= 6
            assert len(setup.decode[0].seen) >= 6
            health = await setup.get("/health")
            assert health.status == 503
            downs = {it["engine"]: it["down"] for it in health.json["engines"]}
            assert "takes no connection" in downs[f"127.0.0.1:{setup.prefill[0].port}"]
            assert downs[f"127.0.0.1:{setup.prefill[1].port}"] is None
            assert (await setup.get("/ready")).status == 200
            await setup.settled()

    run(test())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_engine_of_a_role_is_status_503_until_one_is_back(role: str) -> None:
    async def test() -> None:
        async with serving() as setup:
            engine: Engine = getattr(setup, role)[0]
            await engine.stop()
            reply = await setup.ask({"prompt": PROMPT, "max_tokens": 2})
            assert reply.status == 503
            assert reply.json["error"]["code"] == 503
            assert (
                f"no {role} engine is up (127.0.0.1:{engine.port}" in reply.json["error"]["message"]
            )
            assert (await setup.get("/ready")).status == 503
            await setup.settled()
            async with engine.running():
                await until_true(lambda: is_healthy(setup))
                assert (await setup.ask({"prompt": PROMPT, "max_tokens": 2})).status == 200

    run(test())


async def is_healthy(setup: Setup) -> bool:
    return (await setup.get("/health")).status == 200


def test_an_engine_that_says_it_is_not_well_gets_no_requests() -> None:
    async def test() -> None:
        async with serving(2) as setup:
            setup.prefill[0].health = 503
            await until_true(lambda: is_down(setup, setup.prefill[0], "/health answered 503"))
            for _ in range(4):
                await setup.ask({"prompt": PROMPT, "max_tokens": 2})
            assert not setup.prefill[0].seen
            setup.prefill[0].health = 200
            await until_true(lambda: is_healthy(setup))

    run(test())


def test_an_engine_that_hangs_gets_no_requests_and_one_that_is_late_once_does() -> None:
    async def test() -> None:
        async with serving(2, limits=replace(LIMITS, probe_s=1.0)) as setup:
            late, hung = setup.prefill
            late.health_s = 20.0
            await until(lambda: late.num_probes > 1)  # the one before was too late
            late.health_s = 0.0
            hung.health_s = 20.0
            await until_true(lambda: is_down(setup, hung))
            assert not await is_down(setup, late)
            for _ in range(4):
                await setup.ask({"prompt": PROMPT, "max_tokens": 2})
            assert not hung.seen

    run(test())


def test_a_proxy_without_sockets_blames_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    has_room = [True]
    really_open = legs._open_socket

    def open_socket(address: Any) -> socket.socket:
        if not has_room:
            raise OSError(errno.EMFILE, "Too many open files")
        return really_open(address)

    async def test() -> None:
        monkeypatch.setattr(legs, "_open_socket", open_socket)
        async with serving() as setup:
            has_room.clear()
            reply = await setup.ask({"prompt": PROMPT})
            assert reply.status == 503
            assert "Too many open files" in reply.json["error"]["message"]
            assert await is_healthy(setup)
            has_room.append(True)
            assert (await setup.ask({"prompt": PROMPT})).status == 200

    run(test())


async def is_down(setup: Setup, engine: Engine, reason: str = "") -> bool:
    name = f"127.0.0.1:{engine.port}"
    states = (await setup.get("/health")).json["engines"]
    return any(it["down"] and reason in it["down"] for it in states if it["engine"] == name)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_with_a_request_is_status_502(role: str, stream: bool) -> None:
    async def test() -> None:
        async with serving() as setup:
            other = setup.decode[0] if role == "prefill" else setup.prefill[0]
            other.prefill_s = 20.0
            getattr(setup, role)[0].dies_at_once = True
            reply = await setup.ask({**LONG, "stream": stream})
            assert reply.status == 502
            assert reply.json["error"]["code"] == 502
            assert f"{role} engine 127.0.0.1" in reply.json["error"]["message"]
            await gone(setup, other)
            assert await setup.metric("kvxfer_proxy_legs_total", role=role, outcome="failed") == 1

    run(test())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_whose_engine_dies_ends_with_an_error_event(path: str) -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.decode[0].dies_after = 3
            prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "tell"}]}
            body = prompt if path == CHAT else {"prompt": PROMPT}
            reply = await setup.ask(
                {**body, "max_tokens": 90, "stream": True, "ignore_eos": True}, path
            )
            *chunks, error, end = reply.events
            assert len(chunks) == 3 + (path == CHAT)
            assert error["error"]["code"] == 502
            assert end == "[DONE]"
            await setup.settled()

    run(test())


def test_a_stream_with_other_line_ends_ends_with_an_error_event() -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.decode[0].dies_after = 3
            setup.decode[0].line_end = b"\r\n"
            reply = await setup.ask({**LONG, "stream": True})
            assert reply.body.count(b"\r\n\r\n") == 3
            (error, end) = reply.body.rpartition(b"\r\n\r\n")[2].split(b"\n\n")[:2]
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 502
            assert end == b"data: [DONE]"

    run(test())


def test_a_stream_that_goes_on_with_what_is_no_http_ends_with_an_error_event() -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.decode[0].breaks_chunk = True
            *_, error, end = (await setup.ask({**LONG, "stream": True})).events
            assert (error["error"]["code"], end) == (502, "[DONE]")
            await setup.settled()

    run(test())


@pytest.mark.parametrize("connector", ["nixl", "lmcache"])
def test_a_prefill_s_answer_that_is_no_http_is_status_502(connector: str) -> None:
    async def test() -> None:
        async with serving(connector=connector) as setup:
            setup.prefill[0].breaks_chunk = True
            reply = await setup.ask(LONG)
            assert (reply.status, reply.json["error"]["code"]) == (502, 502)
            await setup.settled()

    run(test())


def test_half_an_event_or_half_an_answer_is_not_passed_for_a_whole_one() -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.decode[0].breaks_off = True
            for stream in (False, True):
                with pytest.raises(aiohttp.ClientError):
                    await setup.ask({**LONG, "stream": stream})
            await setup.settled()

    run(test())


def test_a_prefill_engine_that_dies_after_the_first_token_does_no_harm() -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.decode[0].step_s = 0.02
            body = {"prompt": PROMPT, "max_tokens": 20, "stream": True, "ignore_eos": True}
            asking = asyncio.ensure_future(setup.ask(body))
            await until(lambda: setup.decode[0].num_active and not setup.prefill[0].num_active)
            await setup.prefill[0].stop()
            assert len((await asking).events) == 21

    run(test())


def test_a_decode_that_ends_first_ends_the_prefill() -> None:
    async def test() -> None:
        async with serving() as setup:
            # As after a hand-over that failed: the decode engine computed the prompt itself.
            setup.prefill[0].answer_s = 20.0
            assert (await setup.ask({"prompt": PROMPT, "max_tokens": 2})).status == 200
            await gone(setup, setup.prefill[0])

    run(test())


def test_a_request_that_takes_too_long_is_status_504() -> None:
    async def test() -> None:
        async with serving(limits=replace(LIMITS, request_s=0.5)) as setup:
            setup.prefill[0].prefill_s = 60.0
            begun = [0, 0]
            while not all(begun):  # both legs, before the time was over
                reply = await setup.ask(LONG)
                assert (reply.status, reply.json["error"]["code"]) == (504, 504)
                await setup.settled()
                engines = (setup.prefill[0], setup.decode[0])
                begun = [len(engine.seen) for engine in engines]
            assert [engine.num_aborted for engine in engines] == begun

    run(test())


def test_a_slow_client_slows_the_engine_and_fills_no_buffer() -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.decode[0].padding = "x" * 100_000
            body = {**LONG, "stream": True}
            async with setup.session.post(setup.url + COMPLETIONS, json=body) as response:
                await until(lambda: setup.decode[0].num_written > 0)
                num_written = -1
                while num_written != setup.decode[0].num_written:
                    num_written = setup.decode[0].num_written
                    await asyncio.sleep(1.0)
                # 2,000 chunks of 100 kB are to come; sockets and buffers hold a few MB of them.
                assert 0 < num_written < 200
                async for _ in response.content.iter_any():
                    pass
            assert setup.decode[0].num_written > 2000
            await setup.settled()

    run(test())


def test_ends_of_all_kinds_leave_no_load() -> None:
    async def one(setup: Setup, kind: int) -> None:
        body = {"prompt": PROMPT, "max_tokens": 1 + kind, "stream": bool(kind % 2)}
        if kind % 5 == 0:
            body["max_tokens"] = 0
        asking = asyncio.ensure_future(setup.ask(body))
        if kind % 7 == 0:
            await asyncio.sleep(0.01)
            asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def test() -> None:
        async with serving(2, 2) as setup:
            setup.prefill[0].refusal = (500, REFUSAL)
            setup.decode[1].dies_after = 2
            await asyncio.gather(*(one(setup, kind) for kind in range(60)))
            await setup.settled()
            page = (await setup.get("/metrics")).body.decode()
            assert json.dumps("502")[1:-1] in page

    run(test())
