"""Single requests to an OpenAI server, with a deadline each: health, warm-up, demonstration.

Load is `vllm bench serve`'s; see kvxfer/pd/load.
"""

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable, TransferFailed

_MAX_REPLY_BYTES = 64 << 20
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed completion.

    Attributes:
        text: what came back.
        ttft_s: from sending the request to the first chunk with choices.
        gaps_s: between one such chunk and the next.
    """

    text: str
    ttft_s: float
    gaps_s: tuple[float, ...]


def get(url: str, path: str, timeout_s: float) -> str:
    """The body of ``url + path``.

    Raises:
        NotAvailable: nobody answers there in time.
        TransferFailed: it answered with another status than 200.
    """
    return _exchange("GET", url, path, None, timeout_s)


def post(url: str, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """The JSON object that answers ``body``.

    Raises:
        NotAvailable: nobody answers there in time.
        TransferFailed: it answered with another status than 200, or not with an object.
    """
    text = _exchange("POST", url, path, body, timeout_s)
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TransferFailed(f"{url}{path} answered what is no JSON: {error}") from error
    if not isinstance(answer, dict):
        raise TransferFailed(f"{url}{path} answered {type(answer).__name__}, not an object")
    return answer


def is_healthy(url: str, timeout_s: float) -> bool:
    """Whether ``/health`` answers 200."""
    try:
        get(url, "/health", timeout_s)
    except KvxferError:
        return False
    return True


def complete(url: str, body: Mapping[str, Any], timeout_s: float) -> Answer:
    """Stream ``/v1/completions`` and time its chunks, as `vllm bench serve` does.

    ``timeout_s`` holds for each chunk.

    Raises:
        NotAvailable, TransferFailed: as :func:`post`; or the stream was cut off, or had no token.
    """
    start_s = time.perf_counter()
    texts: list[str] = []
    times_s: list[float] = []
    for event in _events(url, "/v1/completions", {**body, "stream": True}, timeout_s):
        if choices := event.get("choices"):
            times_s.append(time.perf_counter())
            texts.append(str(choices[0].get("text") or ""))
    if not times_s:
        raise TransferFailed(f"{url} answered without a token; see the engine's log")
    gaps_s = (later - earlier for earlier, later in pairwise(times_s))
    return Answer("".join(texts), times_s[0] - start_s, tuple(gaps_s))


def _events(
    url: str, path: str, body: Mapping[str, Any], timeout_s: float
) -> Iterator[dict[str, Any]]:
    """The JSON objects of server-sent events, up to ``[DONE]``."""
    with _Exchange("POST", url, path, body, timeout_s) as response:
        while line := response.readline(_MAX_LINE_BYTES):
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if isinstance(event, dict):
                if "error" in event:
                    raise TransferFailed(f"{url}{path}: {event['error']}")
                yield event
    raise TransferFailed(f"{url}{path}: the stream ended without [DONE]; see the engine's log")


def _exchange(
    method: str, url: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
) -> str:
    with _Exchange(method, url, path, body, timeout_s) as response:
        data = response.read(_MAX_REPLY_BYTES)
        if response.length:  # announced and not there, which a bounded read does not tell
            raise http.client.IncompleteRead(data, response.length)
        return data.decode(errors="replace")


class _Exchange:
    """One request; inside the ``with`` block its response, whose status is 200.

    Errors of the network, there and inside, come out as kvxfer's.
    """

    def __init__(
        self, method: str, url: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise InvalidUsage(f"{url!r} is no http://HOST:PORT")
        self._where = f"{url}{path}"
        self._request = (method, path, None if body is None else json.dumps(body))
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)

    def __enter__(self) -> http.client.HTTPResponse:
        try:
            method, path, body = self._request
            self._connection.request(method, path, body, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            if response.status != http.client.OK:
                text = response.read(4096).decode(errors="replace")
                raise TransferFailed(f"{self._where} answered {response.status}: {text}")
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return response

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._connection.close()
        if isinstance(error, OSError | http.client.HTTPException):
            raise NotAvailable(f"{self._where} does not answer: {error!r}") from error
        if isinstance(error, json.JSONDecodeError):
            raise TransferFailed(f"{self._where} answered what is no JSON: {error}") from error
