"""When the tokens of one answer reach its client.

Only streams have a first token that a client sees; of an answer that comes whole, its end alone
is timed. Numbers of tokens are the engine's own usage where a stream has it, else a token a chunk.
"""

import time
from typing import Final

import msgspec

from kvxfer.errors import ProtocolMismatch
from kvxfer.pd.proxy.body import Prompt
from kvxfer.pd.proxy.metrics import Metrics
from kvxfer.pd.proxy.sse import EventReader


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None

    @property
    def has_token(self) -> bool:
        """A chat begins with a chunk that names the role and holds nothing else."""
        return self.delta is None or self.delta.role is None or bool(self.delta.content)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_chunk: Final = msgspec.json.Decoder(_Chunk)


class AnswerTimes:
    """Of one request, counted in the proxy's metrics.

    Attributes:
        prompt: what the proxy knows of its prompt, once the body has been read.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.prompt: Prompt | None = None
        self._metrics = metrics
        self._began_s = time.monotonic()
        self._events: EventReader | None = EventReader()
        self._usage = _Usage()
        self._num_chunks = 0
        self._first_s = self._last_s = 0.0
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

    def end(self) -> None:
        """The client has all of an answer that was no error."""
        metrics, usage = self._metrics, self._usage
        metrics.e2el_s.observe(time.monotonic() - self._began_s)
        if usage.prompt_tokens > 0:
            metrics.prompt_tokens.observe(usage.prompt_tokens)
        elif self.prompt is not None:
            metrics.prompt_tokens.observe(self.prompt.num_tokens)
            if not self.prompt.is_exact:
                metrics.estimated.add()
        if not self._num_chunks:
            return
        num_tokens = usage.completion_tokens or self._num_chunks
        metrics.output_tokens.observe(num_tokens)
        if num_tokens > 1 and len(self._last_of) == 1:
            metrics.tpot_s.observe((self._last_s - self._first_s) / (num_tokens - 1))

    def _note(self, data: bytes, now_s: float) -> None:
        try:
            chunk = _chunk.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return  # [DONE], or an error's shape
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            if choice.has_token:
                self._token(choice.index, now_s)

    def _token(self, index: int, now_s: float) -> None:
        metrics = self._metrics
        if not self._num_chunks:
            self._first_s = now_s
            metrics.ttft_s.observe(now_s - self._began_s)
        num_before, last_s = self._last_of.get(index, (0, now_s))
        if num_before:
            metrics.itl_s.observe(now_s - last_s)
        if num_before == 1:
            metrics.first_gap_s.observe(now_s - last_s)
        self._last_of[index] = (num_before + 1, now_s)
        self._num_chunks += 1
        self._last_s = now_s
