"""Which requests LMCache's hand-over answers as one server would, and what their legs are sent."""

from typing import Any, Final

import msgspec

from kvxfer.pd.proxy.body import TRANSFER_PARAMS, Body, Fields, Unclear, raw
from kvxfer.pd.proxy.options import EngineAddress
from kvxfer.pd.proxy.rewriting import why_alone

# What the prompt of a chat is made with, by ``/tokenize``.
_TEMPLATE: Final = {
    "add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template",
    "chat_template_kwargs",
}  # fmt: skip
_PER_LEG: Final = _TEMPLATE | {
    "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "stream",
    "stream_options", "n", *TRANSFER_PARAMS,
}  # fmt: skip
# The decode goes on from a prompt that ends with the first token. These mean the same then; what
# counts or looks at the output as a whole (penalties, grammars, log probabilities) does not.
_CONTINUES: Final = _PER_LEG | {
    "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "user", "seed",
    "skip_special_tokens", "spaces_between_special_tokens", "priority", "metadata",
}  # fmt: skip
_WHERE_NOTHING: Final = (b"null", b"false", b"[]", b"{}")
_WHERE_ZERO: Final = ("frequency_penalty", "presence_penalty")
_ZEROS: Final = (b"0", b"0.0")
_DEFAULT_MAX_TOKENS: Final = 16  # of completions, OpenAI's
_MAX_TOKENS: Final = 1 << 31
_MAX_STOPS_BYTES: Final = 64 << 10


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b'""')


def why_not_continued(body: Body) -> str | None:
    """Why a decode engine answers by itself; None where the request is split."""
    reason = why_alone(body)
    if reason is not None:
        return reason
    try:
        return next((why for why, holds in _reasons(body).items() if holds), None)
    except Unclear as error:
        return f"unclear_{error}"


def _reasons(body: Body) -> dict[str, bool]:
    asked = max_tokens(body)
    return {
        "several_outputs": body.number("n", 1) != 1,
        # 16 to vLLM 0.32; to others it may be all that the model has room for.
        "null_max_tokens": not body.is_chat and asked is None,
        "one_token": asked is not None and asked < 2,
        "min_tokens": not 0 <= body.number("min_tokens", 0) <= (asked or _MAX_TOKENS),
        "stream_options": body.has("stream_options") and not body.flag("stream"),
        "seed": body.has("seed") and bytes(body.fields.get("temperature", raw(1))) not in _ZEROS,
        "stop": _may_straddle(body),
        "not_text": body.is_chat and not _is_text(body),
        "not_continued": any(not _continues(name, body) for name in body.fields),
    }


def _continues(name: str, body: Body) -> bool:
    value = bytes(body.fields[name]).strip()
    if name in _CONTINUES or value in _WHERE_NOTHING:
        return True
    return name in _WHERE_ZERO and value in _ZEROS


def _may_straddle(body: Body) -> bool:
    """Whether a stop string may begin in the first token and end in the next."""
    if not body.has("stop"):
        return False
    text = bytes(body.fields["stop"])
    if len(text) > _MAX_STOPS_BYTES:
        raise Unclear("stop")
    try:
        stops = msgspec.json.decode(text, type=str | list[str])
    except msgspec.MsgspecError as error:
        raise Unclear("stop") from error
    return any(len(stop) > 1 for stop in ([stops] if isinstance(stops, str) else stops))


def _is_text(body: Body) -> bool:
    """Whether a chat is text alone: token ids cannot stand for an image."""
    try:
        messages = msgspec.json.decode(body.fields["messages"], type=list[_Message])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Unclear("messages") from error
    return all(bytes(message.content).startswith((b'"', b"null")) for message in messages)


def max_tokens(body: Body) -> int | None:
    """How many tokens are asked for; None is as many as a chat's model has room for.

    Raises:
        Unclear: it is not a whole number.
    """
    if body.is_chat:
        names = ("max_completion_tokens", "max_tokens")
        given = next((name for name in names if body.has(name)), None)
        return None if given is None else body.number(given, 1)
    if "max_tokens" not in body.fields:
        return _DEFAULT_MAX_TOKENS
    return body.number("max_tokens", 1) if body.has("max_tokens") else None


def disagg_spec(request_id: str, receiver: EngineAddress) -> dict[str, Any]:
    """Where a prefill engine sends the KV of a request, as LMCache names it."""
    return {
        "req_id": request_id,
        "receiver_host": receiver.host,
        "receiver_init_port": [channel.init_port for channel in receiver.channels],
        "receiver_alloc_port": [channel.alloc_port for channel in receiver.channels],
    }


def tokenize_fields(body: Body) -> Fields:
    """What ``/tokenize`` is asked."""
    names = _TEMPLATE | {"model", "messages" if body.is_chat else "prompt"}
    return {name: value for name, value in body.fields.items() if name in names}


def prefill_leg(body: Body, tokens: list[int], params: dict[str, Any]) -> Fields:
    """The prefill's fields: the first token, with its id."""
    return _shared(body) | {
        "prompt": raw(tokens),
        "max_tokens": raw(1),
        "min_tokens": raw(min(1, body.number("min_tokens", 0))),
        "stream": raw(False),
        "kv_transfer_params": raw(params),
    }


def decode_leg(body: Body, prompt: list[int], num_left: int) -> Fields:
    """The decode's fields: what is left to do after the first token, which ends ``prompt``."""
    fields = _shared(body) | {
        "prompt": raw(prompt),
        "max_tokens": raw(num_left),
        "min_tokens": raw(max(0, body.number("min_tokens", 0) - 1)),
        "stream": raw(body.flag("stream")),
    }
    if body.has("stream_options"):
        fields["stream_options"] = body.fields["stream_options"]
    return fields


def _shared(body: Body) -> Fields:
    return {name: value for name, value in body.fields.items() if name not in _PER_LEG}
