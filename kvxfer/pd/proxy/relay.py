"""The answer to a client: an engine's bytes, as they come.

Nothing is collected: a client that reads slowly stops the reading of its engine's connection.
"""

from collections.abc import Callable
from typing import Final

from aiohttp import web

from kvxfer.pd.proxy.failure import Failure, error_body
from kvxfer.pd.proxy.legs import Answer, Headers, Opened
from kvxfer.pd.proxy.sse import EVENT_ENDS, event

JSON: Final = ("Content-Type", "application/json")
DONE: Final = event(b"[DONE]")
_TAIL_BYTES: Final = max(map(len, EVENT_ENDS))


class ClientGone(Exception):
    """The client closed its connection; there is nobody to tell."""


class Reply:
    """The answer to one request, from its first byte on.

    Args:
        request: what is answered.
        see: shown each piece of a stream, just before the client gets it.

    Attributes:
        has_begun: whether the client has a status already.
    """

    def __init__(
        self, request: web.Request, see: Callable[[bytes], None] = lambda part: None
    ) -> None:
        self._request = request
        self._see = see
        self._response: web.StreamResponse | None = None
        self._tail = b""

    @property
    def has_begun(self) -> bool:
        """Whether the client has seen a status; from then on it gets no other."""
        return self._response is not None

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the status and headers.

        Raises:
            ClientGone: nobody takes them.
        """
        self._response = web.StreamResponse(status=status, headers=headers)
        try:
            await self._response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error

    async def write(self, part: bytes) -> None:
        """Send bytes at once; waits while the client takes none. An answer to HEAD has none.

        Raises:
            ClientGone: as `begin`.
        """
        if self._request.method == "HEAD":
            return
        self._tail = (self._tail + part)[-_TAIL_BYTES:]
        if self._is_stream:
            self._see(part)
        try:
            await self.response.write(part)
        except ConnectionError as error:
            raise ClientGone from error

    async def end(self) -> None:
        """Send the end.

        Raises:
            ClientGone: as `begin`.
        """
        try:
            await self.response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error

    async def whole(self, answer: Answer) -> None:
        """A whole answer, as it is.

        Raises:
            ClientGone: as `begin`.
        """
        headers = [it for it in answer.headers if it[0].lower() != "content-length"]
        await self.begin(answer.status, [*headers, ("Content-Length", str(len(answer.body)))])
        await self.write(answer.body)
        await self.end()

    async def relay(self, opened: Opened) -> None:
        """An answer that has begun, each piece when it comes.

        Raises:
            LegFailed: the engine ended it too early.
            ClientGone: as `begin`.
        """
        await self.begin(opened.status, opened.headers)
        async for part in opened.parts():
            await self.write(part)
        await self.end()

    async def fail(self, failure: Failure) -> None:
        """Say what went wrong, in whatever way is left.

        Before the first byte that is a status. Between two events of a stream it is an event, as
        vLLM's own server does it; anywhere else the connection breaks off, because a client must
        not take what it has for the whole answer.
        """
        error = error_body(failure.status, str(failure))
        if not self.has_begun:
            await self.whole(Answer(failure.status, [JSON], error))
        elif self._is_stream and self._is_between_events:
            await self.write(event(error) + DONE)
            await self.end()
        else:
            self.break_off()

    def break_off(self) -> None:
        """End the connection where it is."""
        if self._request.transport is not None:
            self._request.transport.abort()

    def result(self) -> web.StreamResponse:
        """What a handler returns; to a client that has gone it makes no difference."""
        return web.Response() if self._response is None else self._response

    @property
    def _is_between_events(self) -> bool:
        return not self._tail or self._tail.endswith(EVENT_ENDS)

    @property
    def _is_stream(self) -> bool:
        return self.response.content_type == "text/event-stream"

    @property
    def response(self) -> web.StreamResponse:
        """What has begun."""
        if self._response is None:
            raise RuntimeError("nothing of the answer has been sent")
        return self._response
