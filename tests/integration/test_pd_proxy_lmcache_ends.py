"""LMCache's hand-over that is refused, lost or left: it is told, and no KV stays behind."""

import asyncio
from dataclasses import replace

import pytest
from pd_proxies import COMPLETIONS, LIMITS, PROMPT, Setup, run, serving, until, until_true


def test_the_first_token_is_sent_before_the_kv_has_arrived() -> None:
    async def test() -> None:
        limits = replace(LIMITS, notice_s=1.0)
        async with serving(connector="lmcache", tp_size=2, limits=limits) as setup:
            setup.wire.num_notices = 1  # of two ranks
            body = {"prompt": PROMPT, "max_tokens": 9, "stream": True}
            async with setup.session.post(setup.url + COMPLETIONS, json=body) as response:
                assert b"data: {" in await response.content.readany()
                rest = await response.content.read()
            assert b"not all of its ranks" in rest
            assert rest.endswith(b"data: [DONE]\n\n")
            await setup.settled()

    run(test())


def test_a_lost_notice_is_status_504() -> None:
    async def test() -> None:
        limits = replace(LIMITS, notice_s=1.0)
        async with serving(connector="lmcache", tp_size=2, limits=limits) as setup:
            setup.wire.num_notices = 1
            reply = await setup.ask({"prompt": PROMPT, "max_tokens": 9})
            assert (reply.status, reply.json["error"]["code"]) == (504, 504)
            assert "pd_proxy_port" in reply.json["error"]["message"]
            await setup.drained()  # what did arrive is taken out again
            await setup.settled()

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_decode_engine_is_told_and_its_buffer_is_emptied(stream: bool) -> None:
    async def test() -> None:
        async with serving(connector="lmcache") as setup:
            setup.decode[0].refusal = (400, b'{"error": {"message": "no"}}')
            reply = await setup.ask({"prompt": PROMPT, "max_tokens": 9, "stream": stream})
            if stream:
                assert "refused to go on (400)" in reply.events[-2]["error"]["message"]
            else:
                assert (reply.status, reply.body) == setup.decode[0].refusal
            await until(lambda: len(setup.decode[0].seen) == 2)
            assert setup.decode[0].seen[1].body["max_tokens"] == 1
            await setup.settled()

    run(test())


def test_a_refusal_of_the_prefill_engine_is_passed_on() -> None:
    async def test() -> None:
        async with serving(connector="lmcache") as setup:
            setup.prefill[0].refusal = (404, b"no such model")
            reply = await setup.ask({"prompt": PROMPT, "max_tokens": 9, "stream": True})
            assert (reply.status, reply.body) == (404, b"no such model")
            assert not setup.decode[0].seen
            await setup.settled()

    run(test())


def test_a_client_that_leaves_before_the_prefill_s_answer_leaves_no_kv_behind() -> None:
    async def test() -> None:
        async with serving(connector="lmcache") as setup:
            setup.prefill[0].answer_held = asyncio.Event()  # it is done, and has not said so
            asking = asyncio.ensure_future(setup.ask({"prompt": PROMPT, "max_tokens": 9}))
            await until(lambda: setup.wire.buffered)
            asking.cancel()
            await setup.drained()
            await until_true(lambda: was_discarded(setup))
            await setup.settled()

    run(test())


def test_a_prefill_engine_that_dies_over_its_answer_leaves_no_kv_behind() -> None:
    async def test() -> None:
        async with serving(connector="lmcache") as setup:
            setup.prefill[0].dies_after = 0
            assert (await setup.ask({"prompt": PROMPT, "max_tokens": 9})).status == 502
            await setup.drained()
            await until_true(lambda: was_discarded(setup))

    run(test())


def test_a_client_that_leaves_between_the_legs_leaves_no_kv_behind() -> None:
    async def test() -> None:
        limits = replace(LIMITS, notice_s=5.0)
        async with serving(connector="lmcache", tp_size=2, limits=limits) as setup:
            setup.wire.num_notices = 1  # it waits for the second
            body = {"prompt": PROMPT, "max_tokens": 9, "stream": True}
            async with setup.session.post(setup.url + COMPLETIONS, json=body) as response:
                await response.content.readany()
                assert setup.wire.buffered
            await setup.drained()
            await until_true(lambda: was_discarded(setup))
            await setup.settled()

    run(test())


async def was_discarded(setup: Setup) -> bool:
    return await setup.metric("kvxfer_proxy_discarded_total", outcome="taken") == 1
