"""What vLLM is told of the connector that moves KV between engines (``--kv-transfer-config``).

vLLM's own names: https://docs.vllm.ai/en/latest/features/disagg_prefill.html. LMCache's: its
``v1/config.py``, where PD mode is ``enable_pd``.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kvxfer.pd.launch.ports import LOOPBACK
from kvxfer.transport import tuned

Role = Literal["prefill", "decode", "both"]
_LMCACHE_SEND_BYTES: Final = 6 << 30  # what a baseline on H200s was measured with
_LMCACHE_RECEIVE_BYTES: Final = 24 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What a connector needs to know of its engine.

    ``num_cores`` are those of a rank on a CPU, 0 on GPUs; ``init_ports`` and ``alloc_ports`` are
    one a rank and of decode engines alone.
    """

    role: Role
    is_cpu: bool
    num_cores: int = 0
    init_ports: tuple[int, ...] = ()
    alloc_ports: tuple[int, ...] = ()
    notification_port: int = 0
    side_port: int = 0


@dataclass(frozen=True, slots=True)
class Wiring:
    """Words and variables of an engine; ``defaults`` are variables that a user may set otherwise,
    ``files`` the texts of what it reads in the folder where it stands, by name."""

    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


def wire(connector: str, endpoint: Endpoint) -> Wiring:
    """How an engine is told of its connector; ``none`` tells it nothing."""
    return _WIRINGS[connector](endpoint)


def _none(endpoint: Endpoint) -> Wiring:
    return Wiring()


def _kvxfer(endpoint: Endpoint) -> Wiring:
    extra: dict[str, Any] = {}
    if endpoint.is_cpu:
        extra["num_threads"] = _cpu_threads(endpoint.num_cores)
    if endpoint.role == "decode":
        extra |= {"init_ports": endpoint.init_ports, "alloc_ports": endpoint.alloc_ports}
    return Wiring(
        _config(
            kv_connector="KvxferConnector",
            kv_connector_module_path="kvxfer.connectors.vllm",
            kv_role=_kv_role(endpoint),
            kv_connector_extra_config=extra,
        )
    )


def _cpu_threads(num_cores: int) -> int:
    """Of the cores that a worker is bound to, as many as the tuning profile has."""
    measured = tuned.section("shm", "private").num_threads
    return num_cores if measured is None else min(measured, num_cores)


def _nixl(endpoint: Endpoint) -> Wiring:
    words = _config(
        kv_connector="NixlConnector",
        kv_role="kv_both",
        **({"kv_buffer_device": "cpu"} if endpoint.is_cpu else {}),
    )
    side = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(endpoint.side_port),
    }
    return Wiring(words, side)


def _lmcache(endpoint: Endpoint) -> Wiring:
    return _lmcache_pd(endpoint, kv_connector="LMCacheConnectorV1")


def _lmcache_together(endpoint: Endpoint) -> Wiring:
    words = {
        "kv_connector": "KvxferLMCacheConnector",
        "kv_connector_module_path": "kvxfer.connectors.lmcache",
    }
    peers = {"LMCACHE_EXTRA_CONFIG": json.dumps({"kvxfer.peers": "kvxfer"})}
    wiring = _lmcache_pd(endpoint, **words)
    return Wiring(wiring.words, {**wiring.environment, **peers})


def _lmcache_pd(endpoint: Endpoint, **connector: str) -> Wiring:
    common = {
        "LMCACHE_ENABLE_PD": "true",
        "LMCACHE_TRANSFER_CHANNEL": "nixl",
        "LMCACHE_LOCAL_CPU": "false",
        "LMCACHE_PD_BUFFER_DEVICE": "cpu" if endpoint.is_cpu else "cuda",
        "PYTHONHASHSEED": "0",  # keys of chunks are hashes, equal on both sides
    }
    extra: dict[str, Any] = {}
    if endpoint.role == "decode":
        # Its prompt has one token more than was stored, which would hide a last chunk cut short.
        extra["skip_last_n_tokens"] = 1
        own = {
            "LMCACHE_PD_ROLE": "receiver",
            "LMCACHE_PD_PEER_HOST": LOOPBACK,
            "LMCACHE_PD_PEER_INIT_PORT": ",".join(map(str, endpoint.init_ports)),
            "LMCACHE_PD_PEER_ALLOC_PORT": ",".join(map(str, endpoint.alloc_ports)),
            "LMCACHE_PD_BUFFER_SIZE": str(_LMCACHE_RECEIVE_BYTES),
        }
    else:
        own = {
            "LMCACHE_PD_ROLE": "sender",
            "LMCACHE_PD_PROXY_HOST": LOOPBACK,
            "LMCACHE_PD_PROXY_PORT": str(endpoint.notification_port),
            "LMCACHE_PD_BUFFER_SIZE": str(_LMCACHE_SEND_BYTES),
        }
    words = _config(
        **connector,
        kv_role=_kv_role(endpoint),
        kv_connector_extra_config={
            "discard_partial_chunks": False,
            "lmcache_rpc_port": f"{endpoint.role}{endpoint.side_port}",
            **extra,
        },
    )
    return Wiring(words, {**common, **own})


_WIRINGS: Final[Mapping[str, Callable[[Endpoint], Wiring]]] = {
    "none": _none,
    "kvxfer": _kvxfer,
    "nixl": _nixl,
    "lmcache": _lmcache,
    "lmcache-together": _lmcache_together,
}


def _kv_role(endpoint: Endpoint) -> str:
    return "kv_consumer" if endpoint.role == "decode" else "kv_producer"


def _config(**fields: Any) -> tuple[str, str]:
    return ("--kv-transfer-config", json.dumps(fields))
