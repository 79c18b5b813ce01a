"""When the tokens of one answer reach its client.

Only streams have a first token that a client sees; of an answer that comes whole, its end alone
is timed. Numbers of tokens are the engine's own usage where a stream has it, else a token a chunk.
What was seen is counted once the answer has ended, because a stream that fails counts nowhere.
"""

import time
from typing import Any, Final

import msgspec

from kvxfer.errors import ProtocolMismatch
from kvxfer.pd.proxy.body import Prompt
from kvxfer.pd.proxy.metrics import Metrics
from kvxfer.pd.proxy.sse import EventReader


class _Delta(msgspec.Struct):
    """Of a chat; a parser of the engine's may put the output elsewhere than into ``content``."""

    role: Any = None
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    function_call: Any = None

    @property
    def has_token(self) -> bool:
        """Whether it holds output; a token without text has an empty ``content``.

        A chat begins with a chunk that names the role, with an empty ``content`` or none.
        """
        outputs = (self.content, self.reasoning, self.reasoning_content)
        calls = (self.tool_calls, self.function_call)
        return any(outputs) or any(calls) or (self.content == "" and self.role is None)


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None

    @property
    def has_token(self) -> bool:
        """Each chunk of a completion has one."""
        return self.delta is None or self.delta.has_token


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None


_chunk: Final = msgspec.json.Decoder(_Chunk)


class AnswerTimes:
    """Of one request, counted in the proxy's metrics.

    Attributes:
        prompt: what the proxy knows of its prompt, once the body has been read.
        error_status: of an error that came as an event of the stream; None: there was none.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.prompt: Prompt | None = None
        self.error_status: int | None = None
        self._metrics = metrics
        self._began_s = time.monotonic()
        self._events: EventReader | None = EventReader()
        self._num_prompt = self._num_output = 0  # by the engine's usage
        self._num_chunks = 0
        self._first_s = self._last_s = 0.0
        self._first_gaps_s, self._gaps_s = metrics.first_gap_s.blank(), metrics.itl_s.blank()
        self._last_of: dict[int, tuple[int, float]] = {}  # choice: chunks so far, the last's time

    def see(self, part: bytes) -> None:
        """Look at bytes of a stream that go to the client now; what is no completion is skipped."""
        if self._events is None:
            return
        now_s = time.monotonic()
        try:
            for data in self._events.feed(part):
                self._note(data, now_s)
        except ProtocolMismatch:  # an event of many megabytes: the client's to judge
            self._events = None

    def end(self, *, is_whole: bool) -> None:
        """Count an answer that did not fail; of one whose client left, what it has seen."""
        metrics = self._metrics
        if self._num_chunks:
            metrics.ttft_s.observe(self._first_s - self._began_s)
            metrics.first_gap_s.add(self._first_gaps_s)
            metrics.itl_s.add(self._gaps_s)
        if not is_whole:
            return
        metrics.e2el_s.observe(time.monotonic() - self._began_s)
        self._count_prompt()
        if not self._num_chunks:
            return
        num_tokens = self._num_output or self._num_chunks
        metrics.output_tokens.observe(num_tokens)
        if num_tokens > 1 and len(self._last_of) == 1:
            metrics.tpot_s.observe((self._last_s - self._first_s) / (num_tokens - 1))

    def _count_prompt(self) -> None:
        if self._num_prompt:
            self._metrics.prompt_tokens.observe(self._num_prompt)
        elif self.prompt is not None:
            self._metrics.prompt_tokens.observe(self.prompt.num_tokens)
            if not self.prompt.is_exact:
                self._metrics.estimated.add()

    def _note(self, data: bytes, now_s: float) -> None:
        try:
            chunk = _chunk.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return  # [DONE], or no chunk
        if chunk.error:
            self.error_status = _status_of(chunk.error)
        self._num_prompt = _count(chunk.usage, "prompt_tokens") or self._num_prompt
        self._num_output = _count(chunk.usage, "completion_tokens") or self._num_output
        for choice in chunk.choices or ():
            if choice.has_token:
                self._token(choice.index, now_s)

    def _token(self, index: int, now_s: float) -> None:
        if not self._num_chunks:
            self._first_s = now_s
        num_before, last_s = self._last_of.get(index, (0, now_s))
        if num_before:
            self._gaps_s.observe(now_s - last_s)
        if num_before == 1:
            self._first_gaps_s.observe(now_s - last_s)
        self._last_of[index] = (num_before + 1, now_s)
        self._num_chunks += 1
        self._last_s = now_s


def _count(usage: object, name: str) -> int:
    """A number of tokens; 0 where there is none."""
    value = usage.get(name) if isinstance(usage, dict) else None
    return max(0, value) if isinstance(value, int) else 0


def _status_of(error: object) -> int:
    """The status that an error event stands for, as vLLM writes it."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code <= 599 else 500
