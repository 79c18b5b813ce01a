"""The proxy in front of vLLM's NixlConnector: no page of a prefill is left behind."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from pd_proxies import CHAT, LIMITS, PROMPT, Setup, answer_of, run, serving, until, until_true

BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 9}


async def freed(setup: Setup) -> None:
    """The prefill engine keeps no pages."""
    await until(lambda: not setup.wire.kept)
    await setup.settled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_client_sees_one_server(is_chat: bool, stream: bool) -> None:
    async def test() -> None:
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "tell me"}]}
        body = {**(prompt if is_chat else {"prompt": PROMPT}), "max_tokens": 9, "stream": stream}
        async with serving(connector="nixl") as setup:
            ours, alone = await setup.ask_both(body, CHAT if is_chat else "/v1/completions")
            assert answer_of(ours) == answer_of(alone)
            await freed(setup)

    run(test())


def test_the_prefill_s_answer_says_where_the_decode_fetches() -> None:
    async def test() -> None:
        async with serving(connector="nixl") as setup:
            await setup.ask(BODY)
            prefill, decode = setup.prefill[0].seen[0].body, setup.decode[0].seen[0].body
            assert prefill["kv_transfer_params"]["do_remote_decode"] is True
            assert decode["kv_transfer_params"]["do_remote_prefill"] is True
            assert (prefill["max_tokens"], decode["max_tokens"]) == (1, 9)

    run(test())


@pytest.mark.parametrize("status", [400, 404, 500])
def test_a_refusal_of_the_decode_engine_frees_the_prefill(status: int) -> None:
    async def test() -> None:
        async with serving(1, 2, connector="nixl") as setup:
            for engine in setup.decode:
                engine.refusal = (status, b"no")
            reply = await setup.ask(BODY)
            assert (reply.status, reply.body) == (status, b"no")
            # They refuse the discarding request as well, and that is counted.
            await until_true(lambda: was_discarded(setup, "kept"))
            assert sum(len(engine.seen) for engine in setup.decode) == 3
            setup.decode[1].refusal = None
            setup.wire.kept.clear()
            for _ in range(2):  # each decode engine once
                await setup.ask(BODY)
            await freed(setup)
            assert await was_discarded(setup, "taken")

    run(test())


async def was_discarded(setup: Setup, outcome: str) -> bool:
    return await setup.metric("kvxfer_proxy_discarded_total", outcome=outcome) == 1


def test_a_decode_engine_that_has_gone_frees_the_prefill() -> None:
    async def test() -> None:
        async with serving(1, 2, connector="nixl") as setup:
            await setup.decode[0].stop()
            for _ in range(2):
                assert (await setup.ask(BODY)).status == 200
            await freed(setup)

    run(test())


def test_a_client_that_leaves_during_the_prefill_ends_it() -> None:
    async def test() -> None:
        async with serving(connector="nixl") as setup:
            setup.prefill[0].prefill_s = 20.0
            asking = asyncio.ensure_future(setup.ask(BODY))
            await until(lambda: setup.prefill[0].num_active)
            asking.cancel()
            await until(lambda: setup.prefill[0].num_aborted == 1)  # after leave_s
            await freed(setup)

    run(test())


def test_a_client_that_leaves_before_the_prefill_s_answer_frees_the_prefill() -> None:
    async def test() -> None:
        limits = replace(LIMITS, leave_s=60.0)
        async with serving(connector="nixl", limits=limits) as setup:
            setup.prefill[0].answer_held = answered = asyncio.Event()
            asking = asyncio.ensure_future(setup.ask(BODY))
            await until(lambda: setup.wire.kept)
            asking.cancel()
            await until_true(lambda: has_left(setup))
            answered.set()
            await freed(setup)
            assert await was_discarded(setup, "taken")

    run(test())


async def has_left(setup: Setup) -> bool:
    return await setup.metric("kvxfer_proxy_clients_gone_total") == 1


def test_a_client_that_leaves_before_the_decode_answers_frees_the_prefill() -> None:
    async def test() -> None:
        async with serving(connector="nixl") as setup:
            setup.decode[0].prefill_s = 60.0  # before it fetches
            asking = asyncio.ensure_future(setup.ask(BODY))
            await until(lambda: setup.decode[0].num_active)
            assert setup.wire.kept
            asking.cancel()
            setup.decode[0].prefill_s = 0.0
            await until(lambda: setup.decode[0].num_aborted == 1)
            await freed(setup)

    run(test())


def test_several_outputs_are_not_split() -> None:
    async def test() -> None:
        async with serving(connector="nixl") as setup:
            assert len((await setup.ask({**BODY, "n": 2})).json["choices"]) == 2
            assert not setup.prefill[0].seen

    run(test())


def test_a_prefill_engine_without_the_connector_is_named() -> None:
    async def test() -> None:
        async with serving(connector="nixl") as setup:
            setup.prefill[0].refusal = (200, b'{"model": "m", "kv_transfer_params": null}')
            reply = await setup.ask(BODY)
            assert reply.status == 502
            assert "NixlConnector" in reply.json["error"]["message"]
            setup.prefill[0].refusal = (200, b"<html>")
            assert (await setup.ask(BODY)).status == 502
            assert not setup.decode[0].seen

    run(test())


def test_the_deadline_holds_for_discards() -> None:
    async def test() -> None:
        async with serving(connector="nixl", limits=replace(LIMITS, discard_s=0.2)) as setup:
            setup.decode[0].refusal = (400, b"no")
            await setup.ask(BODY)
            setup.decode[0].refusal = None
            setup.decode[0].prefill_s = 20.0
            await until_true(lambda: was_discarded(setup, "kept"))

    run(test())
