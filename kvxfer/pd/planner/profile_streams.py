"""Requests of known sizes to a running engine, several at once, with the time of every token."""

import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import msgspec

from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable, TransferFailed
from kvxfer.pd import client

_CHUNK_S = 60.0  # longest wait for one chunk of a stream
_FIRST_ID, _LAST_ID = 16, 1000  # of prompts: every vocabulary has these tokens
_START_S = 10.0


class TimeUp(NotAvailable):
    """The time for a profile is over."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer: when it was sent and when each token came, in seconds of one clock."""

    sent_s: float
    tokens_s: tuple[float, ...]


class Ask(Protocol):
    """Sends ``count`` requests at once; prompts of ``isl`` tokens that share nothing, ``osl`` out.

    Raises:
        TimeUp: the time is over.
        NotAvailable: nobody answers.
    """

    def __call__(self, count: int, isl: int, osl: int) -> list[Stream]:  # noqa: D102
        ...


@dataclass(slots=True)
class Asker:
    """An `Ask` of an OpenAI server's completions, with prompts of token ids.

    Args:
        url: ``http://HOST:PORT``.
        model: the name that it serves.
        left_s: seconds that are left for all that is asked.
    """

    url: str
    model: str
    left_s: Callable[[], float]
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self, count: int, isl: int, osl: int) -> list[Stream]:
        """As of `Ask`.

        Raises:
            TransferFailed: the server refuses, or breaks off.
        """
        streams = [_Streaming(self, self._body(isl, osl)) for _ in range(count)]
        ready = threading.Barrier(count)
        # Daemons: Ctrl-C leaves at once, and ends them with the program.
        threads = [threading.Thread(target=one.run, args=(ready,), daemon=True) for one in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self.left_s()) + _CHUNK_S)
        return [one.result() for one in streams]

    def _body(self, isl: int, osl: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": self._random.choices(range(_FIRST_ID, _LAST_ID), k=isl),
            "max_tokens": osl,
            "min_tokens": osl,
            "ignore_eos": True,
            "temperature": 0,
        }


class _Streaming:
    """One request in a thread of its own."""

    def __init__(self, asker: Asker, body: dict[str, Any]) -> None:
        self._asker = asker
        self._body = body
        self._stream: Stream | None = None
        self._error: BaseException = NotAvailable(f"{asker.url} does not answer in time")

    def run(self, ready: threading.Barrier) -> None:
        """Wait for the others, then send and read."""
        try:
            ready.wait(_START_S)
            left_s = max(self._asker.left_s(), 1e-3)
            sent_s = time.perf_counter()
            timeout_s = min(_CHUNK_S, left_s)
            answer = client.complete(self._asker.url, self._body, timeout_s, most_s=left_s)
            times_s = accumulate(answer.gaps_s, initial=sent_s + answer.ttft_s)
            self._stream = Stream(sent_s, tuple(times_s))
        except (KvxferError, threading.BrokenBarrierError) as error:
            self._error = error

    def result(self) -> Stream:
        """The answer.

        Raises:
            KvxferError: what went wrong.
        """
        if self._stream is None:
            if self._asker.left_s() <= 0.0:
                raise TimeUp(f"{self._asker.url} was not measured in time; give it more time")
            if isinstance(self._error, KvxferError):
                raise self._error
            raise NotAvailable("threads do not start in time; ask for smaller batches")
        return self._stream


class _Served(msgspec.Struct):
    id: str = ""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Served] = []


def longest_request(url: str, model: str, timeout_s: float) -> int | None:
    """Most tokens of a request, prompt and answer, by ``/v1/models``; None where it does not say.

    Raises:
        InvalidUsage: the server does not serve that model; names those that it does.
        NotAvailable, TransferFailed: it does not answer.
    """
    try:
        models = msgspec.json.decode(client.get(url, "/v1/models", timeout_s), type=_Models)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferFailed(f"{url}/v1/models is not an OpenAI server's: {error}") from error
    for one in models.data:
        if one.id == model:
            return one.max_model_len if (one.max_model_len or 0) > 0 else None
    names = ", ".join(one.id for one in models.data) or "none"
    raise InvalidUsage(f"{url} does not serve {model!r}; it serves {names}")


def kv_capacity_tokens(url: str, timeout_s: float) -> int | None:
    """Tokens that the KV memory of the engine at ``url`` holds; None where it does not say.

    From vLLM's ``/metrics``: blocks times their size, of ``vllm:cache_config_info``.
    """
    try:
        text = client.get(url, "/metrics", timeout_s)
    except KvxferError:
        return None
    line = re.search(r"^vllm:cache_config_info\{(.*)\}", text, flags=re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([0-9]{1,12})"', line[1])) if line else {}
    capacity = int(labels.get("num_gpu_blocks", 0)) * int(labels.get("block_size", 0))
    return capacity or None
