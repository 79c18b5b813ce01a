"""Through the proxy a client sees what one server answers: completions and chats, also streamed."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from vllm_engines import Front, Pair, texts
from waiting import eventually

pytest.importorskip("aiohttp", reason="the proxy needs it")

NUM_PROMPTS = 6
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="session")
def front(pair: Pair) -> Iterator[Front]:
    with Front(pair) as made:
        yield made


def prompt(seed: int) -> list[int]:
    rng = random.Random(40_000 + seed)
    return [rng.randrange(1, 8000) for _ in range(rng.randrange(130, 900))]


def streamed_texts(events: list[Any]) -> list[tuple[str, str]]:
    """As :func:`texts`, of a stream with one choice."""
    choices = [event["choices"][0] for event in events if event["choices"]]
    return [("".join(choice["text"] for choice in choices), choices[-1]["finish_reason"])]


@pytest.mark.every_transport
def test_prompts_give_the_tokens_of_one_server(front: Front, pair: Pair) -> None:
    before = pair.decode.metric("kvxfer:num_receives_total")
    for number in range(NUM_PROMPTS):
        body = {"prompt": prompt(number), "max_tokens": 8, "temperature": 0}
        found = streamed_texts(front.events(body)) if number % 2 else texts(front.ask(body))
        assert found == texts(pair.alone(body))
    eventually(
        lambda: pair.decode.metric("kvxfer:num_receives_total") == before + NUM_PROMPTS,
        "the decoder computed a prompt by itself",
    )


def conversation(num_turns: int) -> dict[str, Any]:
    """Messages of random words that the tiny model's tokenizer knows."""
    messages = [{"role": "system", "content": "w17 w4 w99"}]
    for turn in range(num_turns):
        role = "assistant" if turn % 2 else "user"
        words = " ".join(f"w{token}" for token in prompt(100 + turn))
        messages.append({"role": role, "content": words})
    return {"messages": messages, "max_tokens": 10, "temperature": 0}


@pytest.mark.parametrize("num_turns", [1, 3])
def test_a_chat_is_that_of_one_server(front: Front, pair: Pair, num_turns: int) -> None:
    body = conversation(num_turns)
    before = pair.decode.metric("kvxfer:num_receives_total")
    found, alone = front.ask(body, CHAT), pair.alone(body, CHAT)
    assert found["choices"] == alone["choices"]
    assert found["choices"][0]["message"]["role"] == "assistant"
    assert found["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"] > 130
    assert found["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"] == 10
    eventually(
        lambda: pair.decode.metric("kvxfer:num_receives_total") == before + 1,
        "the decoder computed the chat by itself",
    )


def streamed_chat(events: list[Any]) -> tuple[str, str, str, int]:
    """Who speaks, what, why it ends, and how many tokens that were. An engine that is late puts
    several tokens into one event."""
    choices = [event["choices"][0] for event in events if event["choices"]]
    roles = [one["delta"]["role"] for one in choices if "role" in one["delta"]]
    text = "".join(one["delta"].get("content") or "" for one in choices)
    (role,) = roles
    return role, text, choices[-1]["finish_reason"], events[-1]["usage"]["completion_tokens"]


def test_a_streamed_chat_is_that_of_one_server(front: Front, pair: Pair) -> None:
    body = {**conversation(2), "stream_options": {"include_usage": True}}
    found = streamed_chat(front.events(body, CHAT))
    assert found == streamed_chat(pair.prefill.events(body, CHAT))
    message = pair.alone(conversation(2), CHAT)["choices"][0]["message"]
    assert found == ("assistant", message["content"], "length", 10)
