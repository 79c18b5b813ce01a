"""Stores of KV that stand beside an engine, and what the engine is told of them.

Mooncake Store is vLLM's own `MooncakeStoreConnector` and a ``mooncake_master``; the KV lies in
memory that the engine gives to the store. LMCache is its server and the connector in its package,
which fits releases of vLLM old and new. Both connectors are loaded through
`kvxfer.connectors.vllm.timed`, and write when a request was looked up and loaded to ``TIMINGS`` in
the engine's folder. Stores are bound to loopback; but Mooncake's client, in the engine, listens for
data on all addresses without a key, which ``MC_TCP_BIND_ADDRESS`` does not change.
"""

import ctypes
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvxfer.errors import NotAvailable
from kvxfer.pd.launch.connectors import Wiring
from kvxfer.pd.launch.ports import LOOPBACK
from kvxfer.pd.launch.python_site import MOONCAKE, PythonSite
from kvxfer.pd.result import Reuse

_log = logging.getLogger(__name__)
TIMINGS: Final = "timings.jsonl"
LMCACHE_CHUNK_TOKENS: Final = 256
_MOONCAKE_FILE: Final = "mooncake.json"
_TIMED: Final = "kvxfer.connectors.vllm.timed"
_LMCACHE_SERVER: Final = "lmcache.v1.multiprocess.http_server"
_LMCACHE_CONNECTOR: Final = "lmcache.integration.vllm.lmcache_mp_connector:LMCacheMPConnector"
# What Mooncake's packages ask of a machine, also over TCP; the last one where they are for CUDA.
_LIBRARIES: Final = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "libmlx5.so.1": "ibverbs-providers",
}
_GIB: Final = 1 << 30
# Of KV, taken from the host as it fills: on a GPU 64 prompts of the articles' length.
_CPU_STORE_GIB: Final = 1
_GPU_STORE_GIB: Final = 64

Ports = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Held:
    """What a store says of itself: objects, and whether it is being given more just now."""

    num_objects: int
    is_busy: bool


@dataclass(frozen=True, slots=True)
class Store:
    """One store.

    Args:
        words: of its program, after the Python.
        health: the path that answers once it serves.
        page: the path that says how much it holds.
        held: reads it; None where it does not say.
        engine: what its engine is told.
        environment: of its program.
    """

    words: Callable[[Ports, bool], list[str]]
    health: str
    page: str
    held: Callable[[str], Held | None]
    engine: Callable[[Ports, bool], Wiring]
    environment: Mapping[str, str] = field(default_factory=dict)


def require_store(reuse: Reuse, site: PythonSite) -> None:
    """Check that a store's packages are there, and libraries that they cannot do without.

    Raises:
        NotAvailable: names what to install.
    """
    if reuse == "mooncake":
        _log.warning("Mooncake listens on all addresses of this host, and asks for no key")
    has_mooncake = bool(set(MOONCAKE).intersection(site.versions))
    if reuse == "mooncake" and not has_mooncake:
        package = MOONCAKE[2] if site.is_cpu else MOONCAKE[1]
        raise NotAvailable(
            f"reuse=mooncake needs Mooncake, which {site.python} lacks: pip install {package}"
        )
    if reuse == "lmcache" and "lmcache" not in site.versions:
        raise NotAvailable(
            f"reuse=lmcache needs LMCache, which {site.python} lacks: pip install lmcache"
        )
    # LMCache imports Mooncake where it is installed, and ends where that cannot be loaded.
    if reuse in STORES and has_mooncake:
        needed = [*_LIBRARIES][: -1 if site.is_cpu else None]
        missing = [name for name in needed if not has_library(name)]
        if missing:
            packages = " ".join(_LIBRARIES[name] for name in missing)
            raise NotAvailable(
                f"Mooncake needs {', '.join(missing)}, also over TCP: apt-get install {packages}"
            )


def has_library(name: str) -> bool:
    """Whether programs started here can load a shared library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _mooncake_words(ports: Ports, is_cpu: bool) -> list[str]:
    requests, http, _ = ports
    return [
        *("-m", "mooncake.cli"),
        *(f"--rpc_address={LOOPBACK}", f"--rpc_port={requests}"),
        *(f"--metrics_host={LOOPBACK}", f"--metrics_port={http}"),
    ]


def _mooncake_engine(ports: Ports, is_cpu: bool) -> Wiring:
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"{LOOPBACK}:{ports[0]}",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": _store_gib(is_cpu) * _GIB,
        "local_buffer_size": _GIB // 4 if is_cpu else _GIB,
    }
    return Wiring(
        _timed_config("MooncakeStoreConnector", {"lookup_rpc_port": ports[0]}),
        {
            "MOONCAKE_CONFIG_PATH": _MOONCAKE_FILE,
            "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": LOOPBACK,
            "MC_TCP_BIND_ADDRESS": LOOPBACK,
        },
        # As from a store elsewhere: no shortcut through memory that both happen to have, which
        # besides reads a GPU's memory as if it were the host's.
        defaults={"MC_STORE_MEMCPY": "0"},
        files={_MOONCAKE_FILE: json.dumps(config)},
    )


def _lmcache_words(ports: Ports, is_cpu: bool) -> list[str]:
    requests, http, metrics = map(str, ports)
    options = {
        "--host": LOOPBACK,
        "--port": requests,
        "--http-host": LOOPBACK,
        "--http-port": http,
        "--prometheus-port": metrics,
        "--l1-size-gb": str(_store_gib(is_cpu)),
        "--chunk-size": str(LMCACHE_CHUNK_TOKENS),
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "auto",
    }
    # Not by its command line's module, which does nothing when it is run in 0.5.2.
    return ["-m", _LMCACHE_SERVER, *(word for pair in options.items() for word in pair)]


def _lmcache_engine(ports: Ports, is_cpu: bool) -> Wiring:
    extra = {"lmcache.mp.host": f"tcp://{LOOPBACK}", "lmcache.mp.port": ports[0]}
    return Wiring(_timed_config(_LMCACHE_CONNECTOR, extra), _LMCACHE_ENVIRONMENT)


def _mooncake_held(page: str) -> Held | None:
    """Objects that were ever put whole: those that left are no matter."""
    items = {name: int(value) for name, value in _MOONCAKE_ITEMS.findall(page)}
    if not {"start", "end"} <= items.keys():
        return None
    begun = items["start"] - items.get("start_failed", 0)
    return Held(items["end"], is_busy=begun > items["end"] + items.get("revoke", 0))


def _lmcache_held(page: str) -> Held | None:
    objects, locked = (_LMCACHE_COUNTS[name].findall(page) for name in ("total", "locked"))
    if not objects or not locked:
        return None
    return Held(sum(map(int, objects)), is_busy=any(map(int, locked)))


_MOONCAKE_ITEMS: Final = re.compile(
    r"^master_batch_put_(start|start_failed|end|revoke)_items_total ([0-9]{1,15})$", re.MULTILINE
)
_LMCACHE_COUNTS: Final = {
    "total": re.compile(r'"total_object_count": ?([0-9]{1,15})\b'),
    "locked": re.compile(r'"write_locked_count": ?([0-9]{1,15})\b'),
}
_LMCACHE_ENVIRONMENT: Final = {"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}
STORES: Final[Mapping[str, Store]] = {
    "mooncake": Store(_mooncake_words, "/health", "/metrics", _mooncake_held, _mooncake_engine),
    "lmcache": Store(
        _lmcache_words,
        "/healthcheck",
        "/status",
        _lmcache_held,
        _lmcache_engine,
        _LMCACHE_ENVIRONMENT,
    ),
}


def wire_reuse(reuse: Reuse, ports: Ports, *, is_cpu: bool) -> Wiring:
    """How an engine is told where the KV of earlier prompts is."""
    if reuse == "none":
        return Wiring(("--no-enable-prefix-caching",))
    if reuse not in STORES:
        return Wiring()
    wiring = STORES[reuse].engine(ports, is_cpu)
    # In that mode its own prefix cache can be dropped, so that hits can only come from the store.
    besides = {"KVXFER_TIMINGS": TIMINGS, "VLLM_SERVER_DEV_MODE": "1"}
    return replace(wiring, environment={**wiring.environment, **besides})


def _timed_config(connector: str, extra: Mapping[str, Any]) -> tuple[str, str]:
    fields = {
        "kv_connector": connector,
        "kv_connector_module_path": _TIMED,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return ("--kv-transfer-config", json.dumps(fields))


def _store_gib(is_cpu: bool) -> int:
    return _CPU_STORE_GIB if is_cpu else _GPU_STORE_GIB
