"""The proxy in front of LMCache's PD backend with both legs at once."""

import asyncio
from typing import Any

import pytest
from pd_proxies import CHAT, PROMPT, Setup, answer_of, run, serving, until

BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 9}
MODE = "lmcache-together"


async def taken(setup: Setup) -> None:
    """The decode engine has looked up all that came, and nothing else."""
    await setup.drained()
    assert not setup.wire.missed
    await setup.settled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_client_sees_one_server(is_chat: bool, stream: bool) -> None:
    async def test() -> None:
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "tell me"}]}
        # What a prefill's first token could not be joined with: a penalty, and a seed.
        own = {"max_tokens": 9, "stream": stream, "presence_penalty": 1.5, "seed": 3}
        body = {**(prompt if is_chat else {"prompt": PROMPT}), **own}
        async with serving(connector=MODE, tp_size=2) as setup:
            ours, alone = await setup.ask_both(body, CHAT if is_chat else "/v1/completions")
            assert answer_of(ours) == answer_of(alone)
            assert len(setup.prefill[0].seen) == 1
            await taken(setup)

    run(test())


def test_both_legs_are_sent_at_once_under_one_id() -> None:
    async def test() -> None:
        async with serving(connector=MODE, tp_size=2) as setup:
            setup.prefill[0].held = held = asyncio.Event()
            asking = asyncio.ensure_future(setup.ask(BODY))
            await until(lambda: setup.prefill[0].num_active and setup.decode[0].num_active)
            held.set()
            assert (await asking).status == 200
            prefill, decode = setup.prefill[0].seen[0].body, setup.decode[0].seen[0].body
            spec = prefill["kv_transfer_params"]["disagg_spec"]
            assert decode["kv_transfer_params"] == {
                "kvxfer": {"role": "receive", "transfer_id": spec["req_id"]}
            }
            assert spec["receiver_host"] == "127.0.0.1"
            assert spec["receiver_init_port"] == [2000, 2001]
            assert spec["receiver_alloc_port"] == [3000, 3001]
            assert (prefill["max_tokens"], decode["max_tokens"]) == (1, 9)
            await taken(setup)

    run(test())


def test_the_notices_of_all_ranks_are_taken() -> None:
    async def test() -> None:
        async with serving(connector=MODE, tp_size=2) as setup:
            for _ in range(3):
                await setup.ask(BODY)
            await until_noted(setup, 6)

    run(test())


async def until_noted(setup: Setup, count: int) -> None:
    names = ("counted", "unexpected")  # the second where a request was faster than its notice
    while (
        sum([await setup.metric("kvxfer_proxy_notices_total", outcome=name) for name in names])
        < count
    ):
        await asyncio.sleep(0.05)


def test_several_outputs_are_of_one_engine() -> None:
    async def test() -> None:
        async with serving(connector=MODE) as setup:
            reply = await setup.ask(BODY | {"n": 2})
            assert len(reply.json["choices"]) == 2
            assert not setup.prefill[0].seen
            assert "kv_transfer_params" not in setup.decode[0].seen[0].body

    run(test())


@pytest.mark.parametrize("status", [400, 500])
def test_a_refusal_of_the_prefill_ends_the_decode(status: int) -> None:
    async def test() -> None:
        async with serving(connector=MODE) as setup:
            setup.prefill[0].refusal = (status, b"no")
            reply = await setup.ask(BODY)
            assert (reply.status, reply.body) == (status, b"no")
            await until(lambda: setup.decode[0].num_aborted == 1)
            await setup.settled()

    run(test())


def test_a_client_that_leaves_ends_both_legs() -> None:
    async def test() -> None:
        async with serving(connector=MODE) as setup:
            setup.prefill[0].prefill_s = 20.0
            asking = asyncio.ensure_future(setup.ask(BODY))
            await until(lambda: setup.prefill[0].num_active and setup.decode[0].num_active)
            asking.cancel()
            await until(lambda: setup.prefill[0].num_aborted and setup.decode[0].num_aborted)
            await setup.settled()

    run(test())


def test_a_prefill_engine_that_has_gone_is_made_up_for_by_another() -> None:
    async def test() -> None:
        async with serving(2, 1, connector=MODE) as setup:
            await setup.prefill[0].stop()
            for _ in range(2):
                assert (await setup.ask(BODY)).status == 200
            await taken(setup)

    run(test())
