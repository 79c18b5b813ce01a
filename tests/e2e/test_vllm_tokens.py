"""Prompts handed over from one vLLM engine to another: the tokens are those of one server."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from vllm_engines import Pair, texts
from waiting import eventually

EDGES = [2, 3, 126, 127, 128, 129, 130, 255, 256, 257, 511, 512, 513, 1024, 3000]


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed).randrange(1, 8000) for _ in range(1)] + [
        random.Random(seed * 7919 + at).randrange(1, 8000) for at in range(1, length)
    ]


def greedy(tokens: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt": tokens, "max_tokens": 12, "temperature": 0, **more}


def require_same(pair: Pair, body: dict[str, Any]) -> None:
    handed_over, alone = pair.hand_over(body), pair.alone(body)
    assert texts(handed_over) == texts(alone)
    assert handed_over["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
    assert handed_over["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]


@pytest.mark.parametrize("length", [1, *EDGES])
def test_a_prompt_of_any_length_gives_the_same_tokens(pair: Pair, length: int) -> None:
    before = pair.decode.metric("kvxfer:num_receives_total")
    require_same(pair, greedy(prompt(length, length)))
    if length > 1:
        eventually(
            lambda: pair.decode.metric("kvxfer:num_receives_total") == before + 1,
            "the decoder computed it by itself",
        )


def test_random_prompts_give_the_same_tokens(pair: Pair, num_prompts: int) -> None:
    for number in range(num_prompts):
        length = random.Random(number).randrange(2, 1500)
        require_same(pair, greedy(prompt(10_000 + number, length)))


def test_prompts_at_one_time_give_the_same_tokens(pair: Pair) -> None:
    bodies = [greedy(prompt(20_000 + number, 40 + 90 * number)) for number in range(12)]
    with ThreadPoolExecutor(len(bodies)) as threads:
        handed_over = list(threads.map(pair.hand_over, bodies))
    assert [texts(one) for one in handed_over] == [texts(pair.alone(body)) for body in bodies]


def test_a_prefix_that_either_side_has_is_used(pair: Pair) -> None:
    shared = prompt(3, 640)
    require_same(pair, greedy(shared + prompt(4, 70)))
    before = pair.decode.metric("kvxfer:received_bytes_total")
    require_same(pair, greedy(shared + prompt(5, 70)))
    token_bytes = 4 * 2 * 2 * 64 * 4
    eventually(
        lambda: (
            0 < pair.decode.metric("kvxfer:received_bytes_total") - before <= 2 * 128 * token_bytes
        ),
        "all of the prompt came, although the decoder had five blocks of it",
    )
    require_same(pair, greedy(shared + prompt(5, 70)))  # all of it is there


def test_a_streamed_reply_is_the_same(pair: Pair) -> None:
    body = greedy(prompt(6, 300))
    with pair.prefilling(body) as params:
        streamed = {**body, "stream": True, "kv_transfer_params": params}
        with pair.decode.replying(streamed) as reply:
            lines = reply.read().decode().split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text == texts(pair.alone(body))[0][0]


SAMPLING: dict[str, dict[str, Any]] = {
    "seed": {"temperature": 1.0, "seed": 11},
    "top_p": {"temperature": 0.8, "top_p": 0.7, "seed": 12},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "min_tokens": {"min_tokens": 12},
    "n": {"n": 3, "temperature": 1.0, "seed": 13},
    "echo": {"echo": True},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_is_that_of_one_server(pair: Pair, name: str) -> None:
    require_same(pair, {**greedy(prompt(30, 200)), **SAMPLING[name]})


def test_a_stop_string_ends_where_one_server_does(pair: Pair) -> None:
    tokens = prompt(31, 150)
    words = texts(pair.alone(greedy(tokens)))[0][0].split()
    body = greedy(tokens, stop=[words[4]])
    require_same(pair, body)
    assert len(texts(pair.hand_over(body))[0][0].split()) < len(words)


def test_logprobs_are_those_of_one_server(pair: Pair) -> None:
    body = greedy(prompt(32, 333), logprobs=3)
    mine, alone = (
        reply["choices"][0]["logprobs"] for reply in (pair.hand_over(body), pair.alone(body))
    )
    assert mine["tokens"] == alone["tokens"]
    assert mine["token_logprobs"] == pytest.approx(alone["token_logprobs"], abs=1e-3)


def test_logprobs_of_the_prompt_are_computed_by_the_decoder(pair: Pair) -> None:
    body = greedy(prompt(33, 140), prompt_logprobs=1)
    handed_over = pair.decode.ask({**body, "kv_transfer_params": _nobody(pair)})
    assert texts(handed_over) == texts(pair.alone(body))


def _nobody(pair: Pair) -> dict[str, Any]:
    return {"kvxfer": {"role": "receive", "transfer_id": pair.new_id()}}


@pytest.mark.parametrize(
    "params",
    [
        {"kvxfer": 7},
        {"kvxfer": {"role": "receive"}},
        {"kvxfer": {"role": "send", "transfer_id": "t", "receivers": []}},
        {"kvxfer": {"role": "receive", "transfer_id": "x" * 100_000}},
        {"do_remote_prefill": True},
    ],
)
def test_params_that_mean_nothing_leave_the_engines_as_they_are(
    pair: Pair, params: dict[str, Any]
) -> None:
    body = greedy(prompt(34, 50))
    for engine in (pair.prefill, pair.decode):
        assert texts(engine.ask({**body, "kv_transfer_params": params})) == texts(pair.alone(body))


def test_both_pools_are_empty_in_the_end(pair: Pair) -> None:
    require_same(pair, greedy(prompt(35, 700)))
    for engine in (pair.prefill, pair.decode):
        eventually(engine.is_drained, "blocks are still in use")
