"""kvxfer inside LMCache: its PD and P2P transfers, its storage, and its multiprocess server.

``install()`` puts kvxfer's channel under LMCache in one process; vLLM does it by loading
``KvxferLMCacheConnector`` with ``kv_connector_module_path="kvxfer.connectors.lmcache"``. DESIGN.md
says which fault is cured where.
"""

from importlib import import_module
from typing import Any

from kvxfer.connectors.lmcache.install import VERSIONS, install

__all__ = ["VERSIONS", "KvxferBackend", "KvxferL2", "KvxferLMCacheConnector", "install"]

_HOMES = {
    "KvxferLMCacheConnector": "connector",
    "KvxferBackend": "storage",
    "KvxferL2": "mp",
}


def __getattr__(name: str) -> Any:
    # On first use: each needs LMCache, and the first vLLM too.
    if name in _HOMES:
        return getattr(import_module(f"kvxfer.connectors.lmcache.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
