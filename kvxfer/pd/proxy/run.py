"""Puts a proxy together, serves, and takes it apart again."""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web

from kvxfer.control.addresses import format_url, resolve_host
from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.pd.proxy import http_log
from kvxfer.pd.proxy.engine import Engine
from kvxfer.pd.proxy.exchange import Mode, Tools
from kvxfer.pd.proxy.in_turn import InTurn
from kvxfer.pd.proxy.legs import Legs
from kvxfer.pd.proxy.lmcache import LMCache
from kvxfer.pd.proxy.lmcache_together import LMCacheTogether
from kvxfer.pd.proxy.metrics import Metrics
from kvxfer.pd.proxy.notices import Notices
from kvxfer.pd.proxy.options import CONNECTORS, ROUTINGS, ProxyOptions
from kvxfer.pd.proxy.pairing import require_distinct
from kvxfer.pd.proxy.patience import Patience
from kvxfer.pd.proxy.server import Proxy
from kvxfer.pd.proxy.together import Together
from kvxfer.pd.proxy.watch import Watch

_SHUTDOWN_S = 1.0


@asynccontextmanager
async def proxy(options: ProxyOptions) -> AsyncIterator[str]:
    """A running proxy; the value is its URL.

    Raises:
        InvalidUsage: the options contradict each other.
        NotAvailable: an address is in use, or is none of this host.
    """
    _check(options)
    engines = [Engine(address) for address in options.engines]
    async with AsyncExitStack() as stack:
        legs = Legs(options.limits, options.api_key)
        stack.push_async_callback(legs.close)
        tools = Tools(legs, options.limits, Metrics(engines, options.connector))
        mode = _mode(options, engines, tools)
        stack.push_async_callback(mode.close)
        stack.push_async_callback(tools.background.close)
        watch = Watch(engines, legs, options.limits)
        stack.push_async_callback(watch.close)
        await watch.start()
        patience = Patience(options.limits.header_s)
        stack.push_async_callback(patience.close)
        runner = web.AppRunner(
            Proxy(options, engines, tools, mode).app(patience),
            access_log=None,
            logger=http_log.log,
            handler_cancellation=True,  # a client that leaves ends its request at once
            shutdown_timeout=_SHUTDOWN_S,
            auto_decompress=False,
        )
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        assert runner.server is not None  # since set up
        patience.start(runner.server)
        yield await _listen(runner, options.host, options.port)


async def serve(options: ProxyOptions, ended: asyncio.Event, tell: Callable[[str], None]) -> None:
    """Serve until ``ended`` is set; ``tell`` gets the URL once requests are taken.

    Raises:
        InvalidUsage: as `proxy`.
        NotAvailable: as `proxy`.
    """
    async with proxy(options) as url:
        tell(url)
        await ended.wait()


def _check(options: ProxyOptions) -> None:
    for name, value, known in (
        ("connector", options.connector, CONNECTORS),
        ("routing", options.routing, ROUTINGS),
    ):
        if value not in known:
            raise InvalidUsage(f"{name}: {value!r}; use {' or '.join(known)}")
    if {engine.role for engine in options.engines} != {"prefill", "decode"}:
        raise InvalidUsage("a proxy needs a prefill engine and a decode engine at least")
    require_distinct(options.engines)


def _mode(options: ProxyOptions, engines: list[Engine], tools: Tools) -> Mode:
    if options.connector.startswith("lmcache"):
        notices = Notices(options.notice_host, options.notice_port, tools.metrics)
        is_in_turn = options.connector == "lmcache"
        return LMCache(tools, notices) if is_in_turn else LMCacheTogether(tools, notices)
    return InTurn(tools, engines) if options.connector == "nixl" else Together(tools)


async def _listen(runner: web.AppRunner, host: str, port: int) -> str:
    ip = str(resolve_host(host))
    try:
        await web.TCPSite(runner, ip, port).start()
    except OSError as error:
        hint = "choose another --port" if error.errno == errno.EADDRINUSE else "see --host, --port"
        raise NotAvailable(
            f"cannot bind {ip}:{port}: {error.strerror}; {hint}", error.errno or 0
        ) from error
    bound = runner.addresses[0][1]
    return format_url(ip, bound).replace("tcp://", "http://", 1)
