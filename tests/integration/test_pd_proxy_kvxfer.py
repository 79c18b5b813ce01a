"""The proxy in front of kvxfer's connector: a client sees one server."""

import asyncio
import json
from typing import Any

import pytest
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
    until,
)

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tokens": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 8}),
    "text": (COMPLETIONS, {"prompt": "once upon a time", "max_tokens": 8}),
    "no_max_tokens": (COMPLETIONS, {"prompt": PROMPT}),
    "one_token": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1}),
    "stop": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 200, "stop": ["a", "e"]}),
    "eos": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 500}),
    "min_tokens": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 60, "min_tokens": 50}),
    "ignore_eos": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}),
    "penalty": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 20, "frequency_penalty": 1.5}),
    "several_outputs": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 5, "n": 3}),
    "echo": (COMPLETIONS, {"prompt": "once upon", "max_tokens": 5, "echo": True}),
    "several_prompts": (COMPLETIONS, {"prompt": ["one", "two"], "max_tokens": 5}),
    "short_prompt": (COMPLETIONS, {"prompt": [7], "max_tokens": 5}),
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 8}),
    "chat_newer_field": (CHAT, {"messages": MESSAGES, "max_completion_tokens": 8}),
    "chat_several_outputs": (CHAT, {"messages": MESSAGES, "max_tokens": 4, "n": 2}),
}


@pytest.mark.parametrize("how", STREAMS)
@pytest.mark.parametrize("name", BODIES)
def test_a_client_sees_one_server(name: str, how: str) -> None:
    async def test() -> None:
        path, fields = BODIES[name]
        async with serving() as setup:
            ours, alone = await setup.ask_both({"model": "m", **fields, **STREAMS[how]}, path)
            assert answer_of(ours) == answer_of(alone)
            assert len({chunk["id"] for chunk in answer_of(ours) if chunk != "[DONE]"}) == 1
            await setup.settled()

    run(test())


def test_both_legs_say_where_kv_goes() -> None:
    async def test() -> None:
        async with serving(tp_size=2) as setup:
            await setup.ask({"prompt": PROMPT, "max_tokens": 3})
            (prefill,), (decode,) = setup.prefill[0].seen, setup.decode[0].seen
            send = prefill.body["kv_transfer_params"]["kvxfer"]
            receive = decode.body["kv_transfer_params"]["kvxfer"]
            assert (send["role"], receive["role"]) == ("send", "receive")
            assert send["transfer_id"] == receive["transfer_id"]
            assert send["receivers"] == [
                {"init": "tcp://127.0.0.1:2000", "alloc": "tcp://127.0.0.1:3000"},
                {"init": "tcp://127.0.0.1:2001", "alloc": "tcp://127.0.0.1:3001"},
            ]
            await setup.ask({"prompt": PROMPT, "max_tokens": 3})
            assert setup.prefill[0].seen[1].body["kv_transfer_params"]["kvxfer"] != send

    run(test())


def test_the_prefill_leg_is_one_token_and_the_decode_leg_is_the_client_s() -> None:
    async def test() -> None:
        asked = {
            "messages": MESSAGES, "max_tokens": 500, "max_completion_tokens": 400,
            "min_tokens": 100, "stream": True, "stream_options": {"include_usage": True}, "n": 2,
            "temperature": 0.25, "unheard_of": {"a": [1, 2.50, None]},
        }  # fmt: skip
        async with serving() as setup:
            await setup.ask(asked, CHAT)
            (prefill,), (decode,) = setup.prefill[0].seen, setup.decode[0].seen
            del prefill.body["kv_transfer_params"], decode.body["kv_transfer_params"]
            assert decode.body == asked
            assert prefill.body == {
                "messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 1, "n": 1,
                "stream": False, "temperature": 0.25, "unheard_of": {"a": [1, 2.5, None]},
            }  # fmt: skip

    run(test())


def test_values_reach_both_engines_as_they_were_written() -> None:
    async def test() -> None:
        odd = b'"x":1.50,"y":[1e2,  "\\u00e9"]'
        async with serving() as setup:
            assert (await setup.ask(b'{"prompt": [1, 2, 3], ' + odd + b"}")).status == 200
            assert odd in setup.prefill[0].seen[0].raw
            assert odd in setup.decode[0].seen[0].raw

    run(test())


def test_legs_run_at_the_same_time() -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.prefill[0].prefill_s = 60.0
            asking = asyncio.ensure_future(setup.ask({"prompt": PROMPT, "max_tokens": 3}))
            await until(lambda: setup.prefill[0].num_active and setup.decode[0].num_active)
            asking.cancel()
            await setup.settled()

    run(test())


def test_each_chunk_is_passed_on_when_it_comes() -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.decode[0].pace = asyncio.Semaphore(0)
            body = {"prompt": PROMPT, "max_tokens": 4, "stream": True, "ignore_eos": True}
            asking = asyncio.ensure_future(
                setup.session.post(setup.url + COMPLETIONS, json=body).__aenter__()
            )
            setup.decode[0].pace.release()
            response = await asking
            assert response.headers["Content-Type"].startswith("text/event-stream")
            for _ in range(3):  # the engine writes no further chunk before this one is here
                assert (await response.content.readany()).count(b"data: ") == 1
                setup.decode[0].pace.release()
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")

    run(test())


@pytest.mark.parametrize("bytewise", [False, True])
def test_the_decode_engine_s_bytes_are_the_answer(bytewise: bool) -> None:
    async def test() -> None:
        async with serving() as setup:
            for engine in (setup.decode[0], setup.alone):
                engine.bytewise, engine.tokens_per_chunk = bytewise, 3
            body = {"prompt": PROMPT, "max_tokens": 10, "stream": True, "ignore_eos": True}
            ours, alone = await setup.ask_both(body)
            ours_now, alone_now = (json.dumps(answer_of(reply)) for reply in (ours, alone))
            assert ours_now == alone_now
            assert len(ours.events) == 5  # 3 + 3 + 3 + 1 tokens and the end

    run(test())


def test_headers_pass_both_ways_and_those_of_a_connection_do_not() -> None:
    async def test() -> None:
        async with serving(api_key="engine-key") as setup:
            sent = {
                "X-Mine": "1",
                "Authorization": "Bearer mine",
                "Connection": "X-Hop",
                "X-Hop": "2",
            }
            reply = await setup.ask({"prompt": PROMPT}, headers=sent)
            for engine in (setup.prefill[0], setup.decode[0]):
                got = engine.seen[0].headers
                assert (got["X-Mine"], got["Authorization"]) == ("1", "Bearer mine")
                assert "X-Hop" not in got
            assert int(reply.headers["Content-Length"]) == len(reply.body)
            assert reply.headers["Content-Type"] == "application/json; charset=utf-8"

    run(test())


def test_the_key_is_sent_where_a_client_has_none() -> None:
    async def test() -> None:
        async with serving(api_key="engine-key") as setup:
            await setup.ask({"prompt": PROMPT})
            for engine in (setup.prefill[0], setup.decode[0]):
                assert engine.seen[0].headers["Authorization"] == "Bearer engine-key"

    run(test())


ALONE = {
    "prompt_logprobs": {"prompt_logprobs": 1},
    "echo_logprobs": {"echo": True, "logprobs": 1, "prompt": "once upon"},
    "best_of": {"best_of": 2},
    "beam_search": {"use_beam_search": True},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 8},
    "short_prompt": {"prompt": [5]},
    "unclear_prompt": {"prompt": [[1, 2], [3]]},
    "unclear_n": {"n": "2"},
}


@pytest.mark.parametrize("reason", ALONE)
def test_what_must_not_be_split_goes_to_the_decode_engine_alone(reason: str) -> None:
    async def test() -> None:
        body = {"prompt": PROMPT, "max_tokens": 2, "kv_transfer_params": {"kvxfer": {}}}
        async with serving() as setup:
            setup.decode[0].refusal = (418, b"seen")
            assert (await setup.ask({**body, **ALONE[reason]})).status == 418
            assert not setup.prefill[0].seen
            assert "kv_transfer_params" not in setup.decode[0].seen[0].body
            assert await setup.metric("kvxfer_proxy_alone_total", reason=reason) == 1
            await setup.settled()

    run(test())


def test_other_paths_are_one_decode_engine_s() -> None:
    async def test() -> None:
        async with serving() as setup:
            assert (await setup.get("/v1/models")).json["data"] == [{"id": "letters"}]
            asked = await setup.ask({"prompt": "abc"}, "/tokenize")
            assert asked.json["tokens"] == [97, 98, 99]
            missing = await setup.ask({}, "/v1/embeddings")
            assert (missing.status, missing.json["error"]["code"]) == (404, 404)
            wrong = await setup.get(COMPLETIONS)
            assert (wrong.status, wrong.json["error"]["code"]) == (405, 405)

    run(test())


def least_loaded(setup: Setup) -> list[int]:
    return [len(engine.seen) for engine in setup.prefill]


def test_requests_go_to_the_engines_with_the_fewest_tokens() -> None:
    async def test() -> None:
        async with serving(2, 2) as setup:
            held = asyncio.Event()
            for engine in setup.prefill:
                engine.held = held
            long = asyncio.ensure_future(
                setup.ask({"prompt": [1] * 3000, "max_tokens": 8, "ignore_eos": True})
            )
            await until(lambda: sum(least_loaded(setup)) == 1)
            busy = least_loaded(setup).index(1)
            setup.prefill[1 - busy].held = None
            short = [setup.ask({"prompt": PROMPT, "max_tokens": 8}) for _ in range(4)]
            await asyncio.gather(*short)
            assert least_loaded(setup)[busy] == 1
            assert len(setup.decode[busy].seen) + len(setup.decode[1 - busy].seen) == 5
            held.set()
            assert (await long).status == 200
            await setup.settled()

    run(test())


def test_a_prefix_goes_where_it_went_before() -> None:
    async def test() -> None:
        async with serving(3, 3, routing="prefix-affinity") as setup:
            prefixes = [[seed] * 600 for seed in (1, 2, 3)]
            for turn in range(4):
                for prefix in prefixes:
                    await setup.ask({"prompt": [*prefix, turn], "max_tokens": 2})
            assert least_loaded(setup) == [4, 4, 4]
            for engine in setup.prefill:
                assert len({seen.body["prompt"][0] for seen in engine.seen}) == 1

    run(test())


def test_the_checks_of_these_tests_can_fail() -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.decode[0].padding = "not of one server"
            ours, alone = await setup.ask_both({"prompt": PROMPT, "stream": True})
            assert answer_of(ours) != answer_of(alone)
            setup.prefill[0].prefill_s = 20.0
            asking = asyncio.ensure_future(setup.ask({"prompt": PROMPT}))
            await until(lambda: setup.prefill[0].num_active)
            with pytest.raises(AssertionError, match="did not happen in time"):
                await setup.settled(within_s=0.2)
            asking.cancel()
            await setup.settled()

    run(test())
