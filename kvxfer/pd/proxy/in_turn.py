"""vLLM's NixlConnector: the prefill's answer says where the KV is, and the decode fetches it.

Source of the parameters: vLLM, ``distributed/kv_transfer/kv_connector/v1/nixl``.
"""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final

import msgspec

from kvxfer.pd.proxy.body import Body, write_body
from kvxfer.pd.proxy.engine import Engine
from kvxfer.pd.proxy.exchange import Exchange, Pair, Tools
from kvxfer.pd.proxy.failure import Failure, LegFailed
from kvxfer.pd.proxy.legs import Answer
from kvxfer.pd.proxy.rewriting import KV_PARAMS, decode_fields, prefill_fields, why_alone

_KEEP_FOR_REMOTE: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class _Prefilled(msgspec.Struct):
    model: str = ""
    kv_transfer_params: dict[str, Any] | None = None


class InTurn:
    """The mode of ``--connector nixl``."""

    def __init__(self, tools: Tools, engines: Sequence[Engine]) -> None:
        self._tools = tools
        self._engines = engines

    def why_alone(self, body: Body) -> str | None:
        """As `Mode`; several outputs would all fetch, and free, the KV of one request."""
        reason = why_alone(body)
        return "several_outputs" if reason is None and body.number("n", 1) > 1 else reason

    async def answer(self, exchange: Exchange, pair: Pair) -> None:
        """As `Mode`."""
        answer = await self._prefill(exchange, pair)
        if answer.status != 200:
            await exchange.reply.whole(answer)
            return
        prefilled = _read(pair.prefill, answer)
        is_taken = False
        try:
            body = write_body(decode_fields(exchange.body, prefilled.kv_transfer_params))
            with closing(await self._tools.decode(exchange, pair.decode, body)) as opened:
                is_taken = opened.status == 200
                await exchange.reply.relay(opened)
        finally:
            if not is_taken:  # else the prefill engine keeps the pages for minutes
                self._tools.background.run(self._discard(pair.decode, prefilled))

    async def _prefill(self, exchange: Exchange, pair: Pair) -> Answer:
        body = write_body(prefill_fields(exchange.body, _KEEP_FOR_REMOTE))
        leg = asyncio.ensure_future(self._tools.prefill(exchange, pair, body))
        try:
            return await asyncio.shield(leg)
        except asyncio.CancelledError:
            self._tools.background.run(self._left(pair, leg))
            raise

    async def _left(self, pair: Pair, leg: "asyncio.Task[Answer]") -> None:
        """A prefill whose client has gone: its engine may be done, and its answer on the way."""
        try:
            answer = await asyncio.wait_for(leg, self._tools.limits.leave_s)
            if answer.status == 200:
                await self._discard(pair.decode, _read(pair.prefill, answer))
        except (Failure, asyncio.TimeoutError):
            return  # no KV is kept, as far as the proxy can know

    async def _discard(self, asked: Engine, prefilled: _Prefilled) -> None:
        others = [it for it in self._engines if it.role == "decode" and it is not asked]
        engines = [engine for engine in (asked, *others) if engine.is_up]
        # Any prompt will do: the connector fetches for as many tokens as it has, and frees all.
        fields = {"model": prefilled.model, "prompt": [0], KV_PARAMS: prefilled.kv_transfer_params}
        await self._tools.discard(engines, fields)

    async def close(self) -> None:
        """As `Mode`."""


def _read(engine: Engine, answer: Answer) -> _Prefilled:
    try:
        prefilled = msgspec.json.decode(answer.body, type=_Prefilled)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LegFailed(engine, f"answered what is no completion: {error}") from error
    if not prefilled.kv_transfer_params:
        raise LegFailed(
            engine, "answered without kv_transfer_params; run it with vLLM's NixlConnector"
        )
    return prefilled
