"""Single requests to an OpenAI server, with a deadline each: health, warm-up, demonstration.

Load is `vllm bench serve`'s; see kvxfer/pd/load.
"""

import http.client
import ipaddress
import json
import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
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
        gaps_s: between one such chunk and the next; a server that is late sends several tokens in
            one.
        num_tokens: as the server counts them; None where it was not asked (``include_usage``).
    """

    text: str
    ttft_s: float
    gaps_s: tuple[float, ...]
    num_tokens: int | None = None

    @property
    def num_messages(self) -> int:
        """Chunks with choices."""
        return len(self.gaps_s) + 1


def require_host(host: str) -> None:
    """Check that a host may be part of a URL: a name, or an address without brackets or a port.

    Raises:
        InvalidUsage: it may not.
    """
    shown = f"[{host}]" if ":" in host else host
    try:
        if ":" in host:
            ipaddress.IPv6Address(host)
        is_one = not host.split()[1:] and address_of(f"http://{shown}:1") == (host.lower(), 1)
    except ValueError:
        is_one = False
    if not is_one:
        raise InvalidUsage(
            f"{host!r} is no host; give a name, or an address such as 10.0.0.1 or ::1"
        )


def address_of(url: str) -> tuple[str, int | None]:
    """Host and port of ``http://HOST:PORT``; None where it names no port.

    Raises:
        InvalidUsage: it is nothing of the kind, or has a port above 65535.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # as the resolver does, which would raise no OSError
    except ValueError as error:
        raise InvalidUsage(f"{url!r} is no http://HOST:PORT: {error}") from error
    if parts.scheme != "http" or not host:
        raise InvalidUsage(f"{url!r} is no http://HOST:PORT")
    return host, port


def get(url: str, path: str, timeout_s: float) -> str:
    """The body of ``url + path``.

    Raises:
        InvalidUsage: as :func:`address_of`.
        NotAvailable: nobody answers there in time.
        TransferFailed: it answered with another status than 200.
    """
    with _Exchange("GET", url, path, None, timeout_s) as exchange:
        return exchange.text()


def post(url: str, path: str, timeout_s: float) -> str:
    """What answers a POST of an empty object to ``url + path``.

    Raises:
        InvalidUsage, NotAvailable, TransferFailed: as :func:`get`.
    """
    with _Exchange("POST", url, path, {}, timeout_s) as exchange:
        return exchange.text()


def post_all(
    url: str, path: str, bodies: Sequence[Mapping[str, Any]], timeout_s: float
) -> list[dict[str, Any]]:
    """The JSON objects that answer ``bodies``; all are sent before an answer is awaited.

    No threads: Ctrl-C would wait for each. ``timeout_s`` holds for each answer in its turn.

    Raises:
        InvalidUsage: as :func:`address_of`.
        NotAvailable: nobody answers there in time.
        TransferFailed: it answered with another status than 200, or not with an object.
    """
    exchanges = [_Exchange("POST", url, path, body, timeout_s) for body in bodies]
    with ExitStack() as stack:
        for exchange in exchanges:
            stack.enter_context(exchange)
        return [_object(url + path, exchange.text()) for exchange in exchanges]


def _json(where: str, text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TransferFailed(f"{where} answered what is no JSON: {error}") from error


def _object(where: str, text: str) -> dict[str, Any]:
    answer = _json(where, text)
    if not isinstance(answer, dict):
        raise TransferFailed(f"{where} answered {type(answer).__name__}, not an object")
    return answer


def is_healthy(url: str, timeout_s: float, path: str = "/health") -> bool:
    """Whether ``path`` answers 200."""
    try:
        get(url, path, timeout_s)
    except KvxferError:
        return False
    return True


def complete(
    url: str, body: Mapping[str, Any], timeout_s: float, *, most_s: float = math.inf
) -> Answer:
    """Stream ``/v1/completions`` and time its chunks, as `vllm bench serve` does.

    ``timeout_s`` holds for each chunk, ``most_s`` for all of them.

    Raises:
        InvalidUsage, NotAvailable, TransferFailed: as :func:`post_all`; or the stream was cut off,
            had no token, or took longer than ``most_s``.
    """
    start_s = time.perf_counter()
    texts: list[str] = []
    times_s: list[float] = []
    num_tokens: int | None = None
    with closing(_events(url, "/v1/completions", {**body, "stream": True}, timeout_s)) as events:
        for event in events:
            if time.perf_counter() - start_s > most_s:
                raise NotAvailable(f"{url} still answers after {most_s:g} s; give it more time")
            if choices := event.get("choices"):
                times_s.append(time.perf_counter())
                texts.append(_text(url, choices))
            num_tokens = _num_tokens(event) or num_tokens
    if not times_s:
        raise TransferFailed(f"{url} answered without a token; see the engine's log")
    gaps_s = (later - earlier for earlier, later in pairwise(times_s))
    return Answer("".join(texts), times_s[0] - start_s, tuple(gaps_s), num_tokens)


def _text(url: str, choices: Any) -> str:
    try:
        return str(choices[0].get("text") or "")
    except (LookupError, TypeError, AttributeError) as error:
        raise TransferFailed(f"{url} sent choices that are no completion's: {error!r}") from error


def _num_tokens(event: Mapping[str, Any]) -> int | None:
    usage = event.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None


def _events(
    url: str, path: str, body: Mapping[str, Any], timeout_s: float
) -> Generator[dict[str, Any], None, None]:
    """The JSON objects of server-sent events, up to ``[DONE]``."""
    with _Exchange("POST", url, path, body, timeout_s) as exchange:
        response = exchange.response()
        while line := response.readline(_MAX_LINE_BYTES):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = _json(url + path, data)
            if isinstance(event, dict):
                if error := event.get("error"):
                    raise TransferFailed(f"{url}{path}: {error}")
                yield event
    raise TransferFailed(f"{url}{path}: the stream ended without [DONE]; see the engine's log")


class _Exchange:
    """One request, sent at the start of a ``with`` block; inside of it its response.

    Errors of the network, there and inside, come out as kvxfer's.
    """

    def __init__(
        self, method: str, url: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> None:
        host, port = address_of(url)
        self._where = f"{url}{path}"
        self._request = (method, path, None if body is None else json.dumps(body))
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        self._response: http.client.HTTPResponse | None = None

    def response(self) -> http.client.HTTPResponse:
        """The response, whose status is 200."""
        self._response = response = self._connection.getresponse()
        if response.status != http.client.OK:
            text = response.read(4096).decode(errors="replace")
            raise TransferFailed(f"{self._where} answered {response.status}: {text}")
        return response

    def text(self) -> str:
        """All of the response."""
        response = self.response()
        data = response.read(_MAX_REPLY_BYTES)
        if response.length:  # announced and not there, which a bounded read does not tell
            raise http.client.IncompleteRead(data, response.length)
        return data.decode(errors="replace")

    def __enter__(self) -> "_Exchange":
        try:
            method, path, body = self._request
            self._connection.request(method, path, body, {"Content-Type": "application/json"})
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._connection.close()
        if self._response is not None:
            self._response.close()  # which holds the socket where the server closes after it
        if isinstance(error, OSError | http.client.HTTPException):
            raise NotAvailable(
                f"{self._where} does not answer ({_reason(error)}); is the server up there?"
            ) from error


def _reason(error: OSError | http.client.HTTPException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
