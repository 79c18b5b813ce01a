"""The class that vLLM loads in place of ``LMCacheConnectorV1``; its settings are the same.

The only module here that imports vLLM.
"""

import functools
import logging
from typing import Any

from kvxfer.connectors.lmcache.install import install
from kvxfer.errors import KvxferError

# Before LMCache's modules make anything of their own.
install(upgrade=True)

from lmcache.integration.vllm.lmcache_connector_v1 import LMCacheConnectorV1Dynamic  # noqa: E402

_log = logging.getLogger(__name__)
_GUARDED = "_kvxfer_guarded"


class KvxferLMCacheConnector(LMCacheConnectorV1Dynamic):  # type: ignore[misc]
    """LMCache's connector, whose PD and P2P transfers use kvxfer's channel.

    ``transfer_channel: nixl`` means kvxfer here, so that a configuration stays as it is.
    """

    def wait_for_save(self) -> None:
        """Hand over what the step computed.

        A request whose receiver is gone is lost alone: LMCache lets the error out into vLLM's
        worker, which ends the engine.
        """
        engine = self._lmcache_engine.lmcache_engine
        if engine is not None and not hasattr(engine, _GUARDED):
            engine.store = functools.partial(_store, engine.store)
            setattr(engine, _GUARDED, True)
        super().wait_for_save()


def _store(store: Any, *args: Any, **kwargs: Any) -> None:
    try:
        store(*args, **kwargs)
    except KvxferError as error:
        _log.error("request %s is not handed over: %s", kwargs.get("req_id", ""), error)
