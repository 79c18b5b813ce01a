"""LMCache's PD backend with both legs at once, as with kvxfer's own connector.

`KvxferLMCacheConnector` in the decode engine holds a request back until its KV is there, so the way
from one engine's answer into the other's scheduler is over before the KV is, and the decode engine
alone says what the client gets.
"""

from contextlib import closing
from typing import Any

from kvxfer.pd.proxy.body import Body
from kvxfer.pd.proxy.exchange import Exchange, Pair, Tools
from kvxfer.pd.proxy.lmcache_body import disagg_spec
from kvxfer.pd.proxy.notices import Notices
from kvxfer.pd.proxy.together import Together


class LMCacheTogether(Together):
    """The mode of ``--connector lmcache-together``."""

    def __init__(self, tools: Tools, notices: Notices) -> None:
        super().__init__(tools)
        self._notices = notices

    def why_alone(self, body: Body) -> str | None:
        """As `Mode`; of several outputs the first would take the KV off the buffer."""
        reason = super().why_alone(body)
        return "several_outputs" if reason is None and body.number("n", 1) > 1 else reason

    async def answer(self, exchange: Exchange, pair: Pair) -> None:
        """As `Mode`."""
        # Nobody waits for the notices here, but a prefill engine sends them, and stops where it
        # cannot get rid of them.
        num_ranks = len(pair.decode.address.channels)
        with closing(self._notices.expect(exchange.id, num_ranks)):
            await super().answer(exchange, pair)

    def _send_params(self, exchange: Exchange, pair: Pair) -> dict[str, Any]:
        return {"disagg_spec": disagg_spec(exchange.id, pair.decode.address)}

    async def close(self) -> None:
        """As `Mode`."""
        await self._notices.close()
