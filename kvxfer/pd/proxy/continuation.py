"""One answer out of two: the prefill's first token, and the decode that went on from it.

The decode engine took the first token for the last of its prompt. So it counts a prompt token too
many and an output token too few, and a chat's text comes back as a completion's. What comes out of
here is what one server would have said.
"""

from typing import Any, Final

Object = dict[str, Any]

_CHOICE: Final = ("index", "text", "logprobs", "prompt_token_ids", "token_ids")


class Continuation:
    """Completions.

    Args:
        prefilled: the answer of the prefill.
        with_usage: a stream ends with its usage.
        always_usage: so does each of its chunks.
    """

    stream_object = "text_completion"

    def __init__(self, prefilled: Object, *, with_usage: bool, always_usage: bool) -> None:
        self._prefilled = prefilled
        self._choice: Object = prefilled["choices"][0]
        self._with_usage = with_usage
        self._always_usage = with_usage and always_usage
        self._head = {
            "id": self._id(str(prefilled["id"])),
            "object": self.stream_object,
            "created": prefilled["created"],
            "model": prefilled["model"],
        }

    @property
    def has_stopped(self) -> bool:
        """Whether the first token was the last."""
        return bool(self._choice["finish_reason"] == "stop")

    def opening(self) -> list[Object]:
        """The chunks that a stream begins with; all of it where `has_stopped`."""
        ends = {name: self._choice.get(name) for name in ("finish_reason", "stop_reason")}
        ends = ends if self.has_stopped else dict.fromkeys(ends)
        choice = {name: self._choice.get(name) for name in _CHOICE} | ends
        chunks = [*self._before_text(), self._chunk(choice, self._prefilled["usage"])]
        if self.has_stopped and self._with_usage:
            chunks.append({**self._head, "choices": [], "usage": self._prefilled["usage"]})
        return chunks

    def next(self, chunk: Object) -> Object:
        """A chunk of the decode's, as the client gets it."""
        usage = usage_of_both(chunk["usage"]) if chunk.get("usage") else None
        if not chunk.get("choices"):
            return {**chunk, **self._head, "usage": usage}
        return {**chunk, **self._chunk(chunk["choices"][0], usage)}

    def whole(self, decoded: Object | None) -> Object:
        """The answer that is not streamed; ``decoded`` is None where `has_stopped`."""
        last = self._prefilled if decoded is None else decoded
        choice: Object = dict(last["choices"][0])
        usage = last["usage"]
        if decoded is not None:
            choice["text"] = self._choice["text"] + choice["text"]
            usage = usage_of_both(usage)
        return {**last, **self._head, "choices": [self._finished(choice)], "usage": usage} | {
            "object": self.stream_object.removesuffix(".chunk"),
            "kv_transfer_params": None,
        }

    def _chunk(self, choice: Object, usage: Object | None) -> Object:
        chunk = {**self._head, "choices": [self._streamed(choice)]}
        if self._always_usage:
            chunk["usage"] = usage
        return chunk

    def _id(self, prefill_id: str) -> str:
        return prefill_id

    def _before_text(self) -> list[Object]:
        return []

    def _streamed(self, choice: Object) -> Object:
        return choice

    def _finished(self, choice: Object) -> Object:
        return choice


class ChatContinuation(Continuation):
    """Chat completions, of legs that are completions."""

    stream_object = "chat.completion.chunk"

    def _id(self, prefill_id: str) -> str:
        return "chatcmpl-" + prefill_id.removeprefix("cmpl-")

    def _before_text(self) -> list[Object]:
        role = {"role": "assistant", "content": ""}
        chunk: Object = {**self._head, "choices": [_chat_choice({"delta": role}, None)]}
        if self._always_usage:
            num_prompt = self._prefilled["usage"]["prompt_tokens"]
            chunk["usage"] = {
                "prompt_tokens": num_prompt, "total_tokens": num_prompt, "completion_tokens": 0,
            }  # fmt: skip
        return [chunk]

    def _streamed(self, choice: Object) -> Object:
        streamed = _chat_choice({"delta": {"content": choice["text"]}}, choice["finish_reason"])
        if choice["finish_reason"] is not None:
            streamed["stop_reason"] = choice.get("stop_reason")
        return streamed

    def _finished(self, choice: Object) -> Object:
        message = {"role": "assistant", "content": choice["text"], "refusal": None}
        finished = _chat_choice({"message": {**message, "tool_calls": []}}, choice["finish_reason"])
        return {**finished, "stop_reason": choice.get("stop_reason")}


def usage_of_both(usage: Object) -> Object:
    """The decode's usage, with the first token where it belongs; the total is right."""
    return {
        **usage,
        "prompt_tokens": usage["prompt_tokens"] - 1,
        "completion_tokens": usage["completion_tokens"] + 1,
    }


def _chat_choice(said: Object, finish_reason: str | None) -> Object:
    return {"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}
