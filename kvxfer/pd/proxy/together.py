"""kvxfer's connector: both legs at once, and KV is pushed into the decode engine's pages.

The decode engine answers the client, and alone decides what it says: the token of the prefill
engine is thrown away.
"""

import asyncio
from contextlib import closing
from typing import Any

from kvxfer.control.addresses import format_url
from kvxfer.pd.proxy.body import Body, write_body
from kvxfer.pd.proxy.exchange import Exchange, Pair, Tools
from kvxfer.pd.proxy.legs import Answer, Opened
from kvxfer.pd.proxy.options import Channels
from kvxfer.pd.proxy.rewriting import decode_fields, prefill_fields, why_alone


class Together:
    """The mode of ``--connector kvxfer``."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def why_alone(self, body: Body) -> str | None:
        """As `Mode`."""
        return why_alone(body)

    async def answer(self, exchange: Exchange, pair: Pair) -> None:
        """As `Mode`."""
        send = self._send_params(exchange, pair)
        receive = {"role": "receive", "transfer_id": exchange.id}
        prefill = asyncio.ensure_future(
            self._tools.prefill(exchange, pair, write_body(prefill_fields(exchange.body, send)))
        )
        decode = asyncio.ensure_future(
            self._tools.decode(
                exchange, pair.decode, write_body(decode_fields(exchange.body, {"kvxfer": receive}))
            )
        )
        try:
            refusal = await self._refusal(prefill, decode)
            if refusal is not None:
                await exchange.reply.whole(refusal)
                return
            with closing(await decode) as opened:
                await exchange.reply.relay(opened)
        finally:  # whoever left first, nobody waits for either leg any more
            _drop(prefill)
            _drop(decode)

    def _send_params(self, exchange: Exchange, pair: Pair) -> dict[str, Any]:
        """``kv_transfer_params`` of the prefill leg."""
        send = {
            "role": "send",
            "transfer_id": exchange.id,
            "receivers": [receiver(channels) for channels in pair.decode.address.channels],
        }
        return {"kvxfer": send}

    async def _refusal(
        self, prefill: "asyncio.Task[Answer]", decode: "asyncio.Task[Opened]"
    ) -> Answer | None:
        """Wait for the decode engine to begin, or the prefill engine to refuse.

        A bad request is refused by both. The decode engine's refusal is the one to pass on: it saw
        the body as the client wrote it.

        Raises:
            LegFailed: the prefill engine has gone.
        """
        await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
        if decode.done():
            return None
        answer = prefill.result()
        if answer.status == 200:
            await asyncio.wait({decode})
            return None
        if 400 <= answer.status < 500:
            await asyncio.wait({decode}, timeout=self._tools.limits.refusal_s)
        return None if _has_refused(decode) else answer

    async def close(self) -> None:
        """As `Mode`."""


def receiver(channels: Channels) -> dict[str, str]:
    """Where a rank takes KV, as the connector is told."""
    return {
        "init": format_url(channels.host, channels.init_port),
        "alloc": format_url(channels.host, channels.alloc_port),
    }


def _has_refused(decode: "asyncio.Task[Opened]") -> bool:
    is_answered = decode.done() and decode.exception() is None
    return is_answered and decode.result().status != 200


def _drop(leg: "asyncio.Task[Any]") -> None:
    """End a leg, and close what it opened."""
    leg.cancel()
    leg.add_done_callback(_close)


def _close(leg: "asyncio.Task[Any]") -> None:
    if leg.cancelled() or leg.exception() is not None:
        return
    if isinstance(leg.result(), Opened):
        leg.result().close()
