"""The connector for vLLM: KV pages from one engine's paged cache straight into another's.

vLLM loads it with ``kv_connector="KvxferConnector"`` and
``kv_connector_module_path="kvxfer.connectors.vllm"``. DESIGN.md has who does what.
"""

from importlib import import_module
from typing import Any

__all__ = ["KvxferConnector"]


def __getattr__(name: str) -> Any:
    # On first use, because the logic beside it needs no vLLM and is tested without it.
    if name == "KvxferConnector":
        return import_module("kvxfer.connectors.vllm.connector").KvxferConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
