"""What each leg of a request is sent, and which requests are not split."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvxfer.pd.proxy.body import TRANSFER_PARAMS, Body, Fields, Unclear, raw, write_body

KV_PARAMS: Final = "kv_transfer_params"
_NOT_FOR_ENGINES: Final = set(TRANSFER_PARAMS)

# Nothing here may change the prompt: prefill and decode engine must see the same tokens. A field
# goes together with what vLLM refuses without it: logprob_token_ids needs logprobs.
_NOT_FOR_PREFILL: Final = _NOT_FOR_ENGINES | {
    "stream_options", "min_tokens", "best_of", "echo", "logprobs", "top_logprobs",
    "logprob_token_ids",
}  # fmt: skip

# A request is not split where one token and a prefix of the prompt's KV do not stand for it.
_REASONS: tuple[tuple[str, Callable[[Body], bool]], ...] = (
    ("prompt_logprobs", lambda body: body.has("prompt_logprobs")),
    ("prompt_embeds", lambda body: body.has("prompt_embeds")),
    # How much is cut off may depend on max_tokens, which differs between the legs.
    ("truncate_prompt_tokens", lambda body: body.has("truncate_prompt_tokens")),
    ("beam_search", lambda body: body.flag("use_beam_search")),
    ("best_of", lambda body: body.number("best_of", 1) != 1),
    # Log probabilities of the prompt come out of the prefill, which here is another engine's. vLLM
    # computes them for each chat that echoes.
    (
        "echo_logprobs",
        lambda body: body.flag("echo") and (body.is_chat or body.has("logprobs")),
    ),
    ("no_output", lambda body: body.max_tokens(1) < 1),
    # The last token of a prompt is computed where it is decoded, so one alone has no KV to move.
    ("short_prompt", lambda body: body.prompt().is_exact and body.prompt().num_tokens < 2),
)


def why_alone(body: Body) -> str | None:
    """Why the decode engine answers a request by itself; None where it is split."""
    try:
        body.flag("stream")
        body.number("n", 1)
        return next((reason for reason, holds in _REASONS if holds(body)), None)
    except Unclear as error:
        return f"unclear_{error}"


def alone_body(body: Body) -> bytes:
    """The body for a decode engine that gets no KV: the client's, which may not speak of any."""
    if _NOT_FOR_ENGINES.isdisjoint(body.fields):
        return body.raw
    return write_body(_of_client(body))


def prefill_fields(body: Body, params: Mapping[str, Any]) -> Fields:
    """The fields for a prefill engine: one token, not streamed."""
    fields = {name: it for name, it in body.fields.items() if name not in _NOT_FOR_PREFILL}
    fields["max_tokens"] = raw(1)
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = raw(1)
    fields |= {"stream": raw(False), "n": raw(1), KV_PARAMS: raw(params)}
    return fields


def decode_fields(body: Body, params: object) -> Fields:
    """The fields for a decode engine: the client's, and where its KV comes from."""
    return _of_client(body) | {KV_PARAMS: raw(params)}


def _of_client(body: Body) -> Fields:
    """What the client asks for, without where anything is to be moved."""
    return {name: value for name, value in body.fields.items() if name not in _NOT_FOR_ENGINES}
