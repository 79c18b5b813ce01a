"""Asks each engine whether it lives, again and again; one that does not gets no requests."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from kvxfer.pd.proxy.engine import Engine
from kvxfer.pd.proxy.failure import Failure, LegFailed, Unreachable
from kvxfer.pd.proxy.legs import Legs
from kvxfer.pd.proxy.options import Limits

_log = logging.getLogger(__name__)

_WHILE_UP_S: Final = 1.0
_BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0)
_TOLD: Final = 4
_SLOW_ANSWERS: Final = 3  # a busy engine may be late; a dead one refuses at once


class Watch:
    """One task an engine."""

    def __init__(self, engines: Sequence[Engine], legs: Legs, limits: Limits) -> None:
        self._engines, self._legs, self._limits = engines, legs, limits
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Ask all of them once, warn of those that do not answer, then go on in the background."""
        await asyncio.gather(*map(self._look, self._engines))
        if down := [str(engine) for engine in self._engines if not engine.is_up]:
            more = ", ..." if len(down) > _TOLD else ""
            _log.warning(
                "%d of %d engines do not answer yet (%s%s), and get no requests until they do; "
                "/health says why",
                len(down),
                len(self._engines),
                ", ".join(down[:_TOLD]),
                more,
            )
        self._tasks = [asyncio.ensure_future(self._go_on(engine)) for engine in self._engines]

    async def close(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _go_on(self, engine: Engine) -> None:
        num_failed = 0
        while True:
            backoff_s = _BACKOFF_S[min(num_failed, len(_BACKOFF_S) - 1)]
            pause_s = _WHILE_UP_S if engine.is_up else backoff_s
            if await _is_suspected(engine, pause_s):
                await asyncio.sleep(_BACKOFF_S[0])
            num_failed = 0 if await self._look(engine, num_failed) else num_failed + 1

    async def _look(self, engine: Engine, num_failed: int = _SLOW_ANSWERS) -> bool:
        """Probe it once; returns whether it answered as it should."""
        was_up = engine.is_up
        try:
            answer = await self._legs.ask(engine, "/health", timeout_s=self._limits.probe_s)
            reason = "" if answer.status == 200 else f"/health answered {answer.status}"
        except Unreachable as error:
            reason = str(error)
        except LegFailed as error:
            if error.status == 504 and was_up and num_failed + 1 < _SLOW_ANSWERS:
                return False
            reason = str(error)
        except Failure:  # the proxy's own trouble says nothing of the engine
            return engine.is_up
        engine.down_reason = reason
        if was_up != engine.is_up:
            level = logging.INFO if engine.is_up else logging.WARNING
            _log.log(level, "%s is %s", engine, f"down: {reason}" if reason else "up")
        return engine.is_up


async def _is_suspected(engine: Engine, within_s: float) -> bool:
    try:
        await asyncio.wait_for(engine.suspected.wait(), within_s)
    except asyncio.TimeoutError:
        return False
    engine.suspected.clear()
    return True
