"""The legs of requests: HTTP to the engines, a connection of its own for each.

A connection is never used again. So a leg that ends early closes its connection, which is how an
engine learns that nobody waits; and none is ever sent on a connection that died while it was idle.
"""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from kvxfer.pd.proxy.engine import Engine
from kvxfer.pd.proxy.failure import Failure, LegFailed, Unreachable
from kvxfer.pd.proxy.options import Limits

MAX_ANSWER_BYTES: Final = 64 << 20
_READ_BYTES: Final = 64 << 10
# What goes with one connection, not with the message (RFC 9110, section 7.6.1).
_HOP_BY_HOP: Final = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
    "te", "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip
_OF_THE_REQUEST: Final = _HOP_BY_HOP | {"host", "content-length", "expect", "accept-encoding"}
_SHORT_HERE: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
# A host that vanished without a word is noticed in 5 + 5 x 1 s.
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5),
)

Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of an engine."""

    status: int
    headers: Headers
    body: bytes


class Opened:
    """An answer that has begun, on its connection; `close` ends both.

    Attributes:
        engine: whose it is.
        status: of HTTP.
        headers: as the client gets them.
    """

    def __init__(self, engine: Engine, response: aiohttp.ClientResponse, first: bytes) -> None:
        self.engine = engine
        self.status = response.status
        self.headers = _without(response.headers, _HOP_BY_HOP)
        self._response = response
        self._first = first

    def close(self) -> None:
        """Close the connection; an engine ends what it does for it."""
        self._response.close()

    async def parts(self) -> AsyncIterator[bytes]:
        """Its bytes, in the pieces that they come in.

        Raises:
            LegFailed: the engine ended them too early.
        """
        if self._first:
            yield self._first
        while True:
            with _told(self.engine):
                part = await self._response.content.readany()
            if not part:
                return
            yield part

    async def whole(self) -> Answer:
        """All of it.

        Raises:
            LegFailed: as `parts`, or it is above `MAX_ANSWER_BYTES`.
        """
        parts, num_bytes = [], 0
        async for part in self.parts():
            num_bytes += len(part)
            if num_bytes > MAX_ANSWER_BYTES:
                raise LegFailed(self.engine, f"its answer is above {MAX_ANSWER_BYTES} bytes")
            parts.append(part)
        return Answer(self.status, self.headers, b"".join(parts))


class Legs:
    """Opens them; to be closed, on the event loop that it was made on."""

    def __init__(self, limits: Limits, api_key: str | None = None) -> None:
        self._key: Headers = [("Authorization", f"Bearer {api_key}")] if api_key else []
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_open_socket),
            timeout=aiohttp.ClientTimeout(total=limits.request_s, sock_connect=limits.connect_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=_READ_BYTES,
        )

    async def close(self) -> None:
        """End all legs."""
        await self._session.close()

    def headers_for(self, headers: Mapping[str, str], request_id: str) -> Headers:
        """A client's headers, as both engines get them.

        The client's Authorization goes before the proxy's own key, its X-Request-Id before
        ``request_id``.
        """
        own = [*self._key, ("X-Request-Id", request_id)]
        return _without(headers, _OF_THE_REQUEST) + [it for it in own if it[0] not in headers]

    async def open(
        self,
        engine: Engine,
        path: str,
        body: bytes | None = None,
        headers: Headers | None = None,
        timeout_s: float | None = None,
    ) -> Opened:
        """An answer whose first bytes are here.

        A POST where there is a body, else a GET; without ``headers`` it is the proxy's own.

        Raises:
            Unreachable: nobody took the connection.
            LegFailed: it ended without an answer.
            Failure: 503, this process cannot open more connections.
        """
        extra: dict[str, Any] = {}
        if timeout_s is not None:
            extra["timeout"] = aiohttp.ClientTimeout(total=timeout_s)
        if headers is None:
            headers = [*self._key, ("Content-Type", "application/json")]
        with _told(engine):
            response = await self._session.request(
                "GET" if body is None else "POST",
                engine.url + path,
                data=body,
                headers=headers,
                allow_redirects=False,
                **extra,
            )
            _end_with_connection(response)
            try:
                return Opened(engine, response, await response.content.readany())
            except BaseException:
                response.close()
                raise

    async def ask(
        self,
        engine: Engine,
        path: str,
        body: bytes | None = None,
        headers: Headers | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """A whole answer; the rest as `open`."""
        with closing(await self.open(engine, path, body, headers, timeout_s)) as opened:
            return await opened.whole()


def _end_with_connection(response: aiohttp.ClientResponse) -> None:
    """End the reading of a body where its connection ends.

    aiohttp closes the connection over a malformed chunk, and leaves who reads the body to wait.
    """
    connection, content = response.connection, response.content
    if connection is None or connection.protocol is None:
        return  # all is here

    def end(closed: "asyncio.Future[None] | None" = None) -> None:
        if closed is not None and not closed.cancelled():
            closed.exception()  # else asyncio says that nobody looked at it
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("its body is no HTTP"))

    closed = connection.protocol.closed
    if closed is None:
        end()
    else:
        closed.add_done_callback(end)


def _without(headers: Mapping[str, str], left_out: set[str]) -> Headers:
    """Headers but for some, and for those that Connection names."""
    named = headers.get("Connection", "").lower().replace(" ", "").split(",")
    return [
        (name, value)
        for name, value in headers.items()
        if name.lower() not in left_out and name.lower() not in named
    ]


@contextmanager
def _told(engine: Engine) -> Iterator[None]:
    """Says what of aiohttp's errors a client and the router want to know."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        if isinstance(error, OSError) and error.errno in _SHORT_HERE:
            raise Failure(503, f"the proxy has no room for a connection: {error}") from error
        raise Unreachable(engine, f"takes no connection ({error})", 503) from error
    except asyncio.TimeoutError as error:
        raise LegFailed(engine, "did not answer within the deadline", 504) from error
    except aiohttp.ClientError as error:
        why = str(error) or type(error).__name__
        raise LegFailed(engine, f"ended the connection before its answer ({why})") from error


def _open_socket(address: tuple[Any, ...]) -> socket.socket:
    opened = socket.socket(*address[:3])
    for level, option, value in _KEEPALIVE:
        opened.setsockopt(level, option, value)
    return opened
