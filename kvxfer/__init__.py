"""kvxfer moves paged KV caches between prefill and decode workers, and measures it.

Names are loaded on first use, so ``import kvxfer`` costs milliseconds and never pulls in torch,
cupy or a CUDA driver.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.layout import (
        BlockMap,
        BlockTable,
        CopyPlan,
        KVLayout,
        KVShard,
        KVView,
        ModelShape,
        Route,
        ToFp8,
        TPLayout,
        load_model,
        plan,
    )
    from kvxfer.memory import KVCache, register, shared_empty
    from kvxfer.session import Endpoint, Peer, PeerGroup, Receiver, Sender
    from kvxfer.transport import available_transports

_HOME = {
    "BlockMap": "kvxfer.layout",
    "BlockTable": "kvxfer.layout",
    "CopyPlan": "kvxfer.layout",
    "KVLayout": "kvxfer.layout",
    "KVShard": "kvxfer.layout",
    "KVView": "kvxfer.layout",
    "ModelShape": "kvxfer.layout",
    "Route": "kvxfer.layout",
    "TPLayout": "kvxfer.layout",
    "ToFp8": "kvxfer.layout",
    "load_model": "kvxfer.layout",
    "plan": "kvxfer.layout",
    "KVCache": "kvxfer.memory",
    "register": "kvxfer.memory",
    "shared_empty": "kvxfer.memory",
    "Endpoint": "kvxfer.session",
    "Peer": "kvxfer.session",
    "PeerGroup": "kvxfer.session",
    "Receiver": "kvxfer.session",
    "Sender": "kvxfer.session",
    "available_transports": "kvxfer.transport",
}

__version__ = "0.1.0"
__all__ = [
    "BlockMap",
    "BlockTable",
    "CopyPlan",
    "Endpoint",
    "KVCache",
    "KVLayout",
    "KVShard",
    "KVView",
    "ModelShape",
    "Peer",
    "PeerGroup",
    "Receiver",
    "Route",
    "Sender",
    "TPLayout",
    "ToFp8",
    "available_transports",
    "load_model",
    "plan",
    "register",
    "shared_empty",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if name == "_core" and find_spec("kvxfer._core") is None:
        raise ImportError(
            f"{__path__[0]} is kvxfer's source tree, where the native core is not built; run from "
            "another folder, or install with pip install -e ."
        )
    if home is None:
        raise AttributeError(f"module 'kvxfer' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
