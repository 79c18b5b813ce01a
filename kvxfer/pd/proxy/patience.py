"""Ends connections that do not ask: one that sends half a header, or nothing, is closed in time.

aiohttp bounds how long a connection may idle after an answer, and the proxy how long a body may
take; nothing bounds the first header.
"""

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware


class Patience:
    """Watches the connections of one server.

    Args:
        limit_s: from a connection's start to the end of its first request's header.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._silent: dict[web.RequestHandler, float] = {}  # and when each was first seen
        self._heard: set[web.RequestHandler] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def middleware(self) -> Middleware:
        """Tells which connections have asked."""

        @web.middleware
        async def hear(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._heard.add(request.protocol)
            return await handler(request)

        return hear

    def start(self, server: web.Server) -> None:
        """Watch until `close`."""
        self._task = asyncio.ensure_future(self._watch(server))

    async def close(self) -> None:
        """Watch no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self, server: web.Server) -> None:
        while True:
            await asyncio.sleep(self._limit_s / 4)
            self._look(server.connections, asyncio.get_running_loop().time())

    def _look(self, connections: list[web.RequestHandler], now_s: float) -> None:
        self._heard.intersection_update(connections)
        self._silent = {
            one: self._silent.get(one, now_s) for one in connections if one not in self._heard
        }
        for connection, since_s in self._silent.items():
            if now_s - since_s >= self._limit_s:
                connection.force_close()
