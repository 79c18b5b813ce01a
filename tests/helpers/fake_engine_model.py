"""A model of letters: a token is a character, and the next one depends on all before it.

What vLLM does with the fields of a request is done here the plain way, for a whole prompt at once,
so that an answer put together by a proxy can be compared with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

EOS = ord("z")
MAX_MODEL_LEN = 4096


class Refused(Exception):
    """A request that an engine answers with status 400."""


@dataclass(frozen=True)
class Step:
    """One token of one output."""

    index: int
    token: int
    text: str
    finish_reason: str | None
    stop_reason: str | int | None


def tokenize(text: str) -> list[int]:
    return [ord(letter) % 128 for letter in text]


def chat_text(messages: list[dict[str, Any]]) -> str:
    turns = [f"<{message['role']}>{message['content']}" for message in messages]
    return "".join([*turns, "<assistant>"])


def next_token(tokens: list[int], outputs: list[int], body: dict[str, Any], index: int) -> int:
    """A letter; penalties count outputs alone, as vLLM's presence and frequency penalties do."""
    mixed = 17 + index
    for token in tokens:
        mixed = (mixed * 31 + token + 1) % 1_000_003
    mixed += 7 * len(outputs) * bool(body.get("frequency_penalty"))
    return ord("a") + mixed % 26


def prompts_of(body: dict[str, Any], is_chat: bool) -> list[list[int]]:
    if is_chat:
        return [tokenize(chat_text(body["messages"]))]
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [tokenize(prompt)]
    if isinstance(prompt, list) and prompt and all(isinstance(it, int) for it in prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        return [tokenize(it) if isinstance(it, str) else it for it in prompt]
    raise Refused("prompt is missing")


def max_tokens_of(body: dict[str, Any], is_chat: bool, room: int) -> int:
    if is_chat:
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
    else:  # vLLM 0.32 takes null for its default, too
        asked = 16 if body.get("max_tokens") is None else body["max_tokens"]
    if asked is None:
        return room
    if asked < 1 or asked > room:
        raise Refused(f"max_tokens is {asked}; there is room for {room}")
    return int(asked)


def check(body: dict[str, Any], max_tokens: int) -> None:
    if body.get("stream_options") and not body.get("stream"):
        raise Refused("stream options can only be defined when stream=True")
    if (body.get("min_tokens") or 0) > max_tokens:
        raise Refused("min_tokens must be at most max_tokens")


def generate(
    prompt: list[int], body: dict[str, Any], max_tokens: int, index: int
) -> Iterator[Step]:
    """The tokens of one output."""
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    outputs: list[int] = []
    text = ""
    while True:
        token = next_token([*prompt, *outputs], outputs, body, index)
        outputs.append(token)
        may_stop = len(outputs) > (body.get("min_tokens") or 0)
        if token == EOS and may_stop and not body.get("ignore_eos"):
            yield Step(index, token, "", "stop", None)
            return
        before, text = text, text + chr(token)
        found = [stop for stop in stops if stop in text] if may_stop else []
        if found:
            kept = text[: text.index(found[0])]
            yield Step(index, token, kept[len(before) :], "stop", found[0])
            return
        finish = "length" if len(outputs) == max_tokens else None
        yield Step(index, token, chr(token), finish, None)
        if finish:
            return


def usage(num_prompt: int, num_output: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_output,
        "completion_tokens": num_output,
    }
