"""The JSON body of a request: read as far as the proxy must, and otherwise left as it came.

Values stay bytes of the original text (`msgspec.Raw`), so what the proxy does not know, numbers in
odd notation included, reaches the engines unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from kvxfer.pd.proxy.failure import Failure

Fields = dict[str, msgspec.Raw]
NULL: Final = b"null"
TRANSFER_PARAMS: Final = ("kv_transfer_params", "ec_transfer_params")
"""Where an engine sends KV or encoder outputs, or takes them from: the proxy's to say."""

_decoder = msgspec.json.Decoder(Fields)
_scalar = msgspec.json.Decoder(int | float | bool | str | None)
_SCALAR_BYTES = 64
_BYTES_A_TOKEN = 4  # of English text; only loads are estimated with it


class Unclear(Exception):
    """A value that the proxy cannot read; an engine may, or refuses it in its own words."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What comes before the output.

    Attributes:
        text: its JSON: a string, a list of token ids, or a chat's list of messages.
        num_tokens: exact for token ids, else estimated.
        is_exact: which of the two.
    """

    text: bytes
    num_tokens: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body; ``fields`` are those of ``raw``."""

    raw: bytes
    fields: Fields
    is_chat: bool

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return bytes(self.fields.get(name, msgspec.Raw(NULL))) != NULL

    def number(self, name: str, default: int) -> int:
        """A whole number; ``default`` where the field is absent or null.

        Raises:
            Unclear: it is something else.
        """
        value = self._scalar(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise Unclear(name)
        return value

    def flag(self, name: str) -> bool:
        """A truth value; False where the field is absent or null.

        Raises:
            Unclear: it is something else.
        """
        value = self._scalar(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise Unclear(name)
        return value

    def max_tokens(self, default: int) -> int:
        """How many tokens are asked for, a chat's newer field first.

        Raises:
            Unclear: it is not a whole number.
        """
        if self.is_chat and self.has("max_completion_tokens"):
            return self.number("max_completion_tokens", default)
        return self.number("max_tokens", default)

    def prompt(self) -> Prompt:
        """The one prompt.

        Raises:
            Unclear: there is none, or several, or none that is known.
        """
        name = "messages" if self.is_chat else "prompt"
        text = bytes(self.fields.get(name, msgspec.Raw(NULL))).strip()
        inner = text[1:-1].strip()
        if self.is_chat and text.startswith(b"["):
            return Prompt(text, len(text) // _BYTES_A_TOKEN, is_exact=False)
        if text.startswith(b'"'):
            return Prompt(text, len(inner) // _BYTES_A_TOKEN, is_exact=False)
        if text.startswith(b"[") and inner[:1].isdigit():
            return Prompt(text, inner.count(b",") + 1, is_exact=True)
        raise Unclear(name)

    def _scalar(self, name: str) -> int | float | bool | str | None:
        raw = self.fields.get(name, msgspec.Raw(NULL))
        if len(bytes(raw)) > _SCALAR_BYTES:
            raise Unclear(name)
        try:
            value: int | float | bool | str | None = _scalar.decode(raw)
            return value
        except msgspec.MsgspecError as error:
            raise Unclear(name) from error


def read_body(raw: bytes, *, is_chat: bool) -> Body:
    """A body whose fields are known by name.

    Raises:
        Failure: 400, it is no JSON object, or hides one of `TRANSFER_PARAMS`.
    """
    try:
        body = Body(raw, _decoder.decode(raw), is_chat)
        hidden = body.has("vllm_xargs") and _decoder.decode(body.fields["vllm_xargs"])
    except RecursionError as error:
        raise Failure(400, "the body is nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Failure(400, f"the body is not a JSON object: {error}") from error
    # vLLM merges these with the fields of those names, so that they reach the connector.
    for name in TRANSFER_PARAMS:
        if hidden and name in hidden:
            raise Failure(400, f"vllm_xargs.{name} is not for clients to set; leave it out")
    return body


def write_body(fields: Mapping[str, msgspec.Raw]) -> bytes:
    """Fields as JSON, each as it came."""
    return msgspec.json.encode(fields)


def raw(value: object) -> msgspec.Raw:
    """A value for a field."""
    return msgspec.Raw(msgspec.json.encode(value))
