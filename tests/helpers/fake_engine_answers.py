"""Answers as vLLM writes them: whole, and as chunks of a stream."""

from collections.abc import Iterator
from typing import Any

from fake_engine_model import Step, usage

Object = dict[str, Any]


class Answers:
    """Of one request."""

    def __init__(self, request_id: str, created: int, body: Object, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._body = body
        self._head = {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + request_id,
            "created": created,
            "model": body.get("model") or "letters",
        }
        options = body.get("stream_options") or {}
        self._with_usage = bool(options.get("include_usage"))
        self._always = self._with_usage and bool(options.get("continuous_usage_stats"))

    def whole(self, steps: list[Step], num_prompt: int, kv_params: Any) -> Object:
        choices = []
        for index in sorted({step.index for step in steps}):
            own = [step for step in steps if step.index == index]
            text = self._echoed() + "".join(step.text for step in own)
            ends = {"finish_reason": own[-1].finish_reason, "stop_reason": own[-1].stop_reason}
            said: Object = {"text": text}
            if self._is_chat:
                message = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
                said = {"message": message}
            choices.append({"index": index, **said, "logprobs": None, **ends})
        return {
            **self._head,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "choices": choices,
            "usage": usage(num_prompt, len(steps)),
            "kv_transfer_params": kv_params,
        }

    def opening(self, num_outputs: int, num_prompt: int) -> Iterator[Object]:
        """The chunks before any text."""
        if self._is_chat:
            for index in range(num_outputs):
                delta = {"role": "assistant", "content": ""}
                yield self._chunk(index, {"delta": delta}, None, None, num_prompt, 0)

    def chunk(self, steps: list[Step], num_prompt: int, num_output: int) -> Object:
        """Some steps of one output, the first ``num_output`` of it included."""
        text = "".join(step.text for step in steps)
        if num_output == len(steps):
            text = self._echoed() + text
        said: Object = {"delta": {"content": text}} if self._is_chat else {"text": text}
        last = steps[-1]
        return self._chunk(
            last.index, said, last.finish_reason, last.stop_reason, num_prompt, num_output
        )

    def closing(self, num_prompt: int, num_output: int) -> Iterator[Object]:
        """The chunks after all text."""
        if self._with_usage:
            kind = "chat.completion.chunk" if self._is_chat else "text_completion"
            head = {**self._head, "object": kind}
            yield {**head, "choices": [], "usage": usage(num_prompt, num_output)}

    def _chunk(
        self, index: int, said: Object, finish: Any, stop: Any, num_prompt: int, num_output: int
    ) -> Object:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": finish}
        kind = "text_completion"
        if self._is_chat:
            kind = "chat.completion.chunk"
            choice |= {"stop_reason": stop} if finish else {}
        else:
            choice |= {"stop_reason": stop, "prompt_token_ids": None, "token_ids": None}
        chunk = {**self._head, "object": kind, "choices": [choice]}
        return chunk | ({"usage": usage(num_prompt, num_output)} if self._always else {})

    def _echoed(self) -> str:
        is_echo = self._body.get("echo") and not self._is_chat
        return str(self._body["prompt"]) if is_echo else ""
