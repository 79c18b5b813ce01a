"""Stores of KV that stand beside an engine, and what the engine is told of them.

Mooncake Store is vLLM's own `MooncakeStoreConnector` and a ``mooncake_master``; the KV lies in
memory that the engine gives to the store. LMCache is its server and the connector in its package,
which fits releases of vLLM old and new. ``lmcache-far`` is two such servers: the one beside the
engine keeps nothing that it is given and moves it to the far one, from which it reads it by
kvxfer's L2 plug-in (`kvxfer.connectors.lmcache.mp`). All connectors are loaded through
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
from kvxfer.pd.launch.ports import LOOPBACK, StorePorts
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

# Of the L2 plug-in: a page takes what one rank has of a chunk. A peer maps all pages when it first
# comes, which takes the longer the more there are.
_CPU_PAGE_BYTES: Final = 8 << 20
_GPU_PAGE_BYTES: Final = 64 << 20
_NUM_PAGES: Final = 128
_FAR_L1_GIB: Final = "0.1"  # nobody asks that server for more than is in its pool


@dataclass(frozen=True, slots=True)
class Held:
    """What a store says of itself.

    Attributes:
        num_objects: that it has, or was ever given.
        is_busy: it is being given more just now.
        num_far: that lookups ever found in its far store, and were read from there.
        num_near: that they found in the store itself, where it has a far one.
    """

    num_objects: int
    is_busy: bool
    num_far: int = 0
    num_near: int = 0


@dataclass(frozen=True, slots=True)
class Store:
    """One store.

    Args:
        words: of its program, after the Python.
        health: the path that answers once it serves.
        page: the path that says how much it holds.
        held: reads that page; None where it does not say.
        engine: what its engine is told.
        environment: of its program.
        far_words: of the program of a far store, which all hits are to come from; None where there
            is none.
    """

    words: Callable[[StorePorts, bool], list[str]]
    health: str
    page: str
    held: Callable[[str], Held | None]
    engine: Callable[[StorePorts, bool], Wiring]
    environment: Mapping[str, str] = field(default_factory=dict)
    far_words: Callable[[StorePorts, bool], list[str]] | None = None


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
    if reuse in ("lmcache", "lmcache-far") and "lmcache" not in site.versions:
        raise NotAvailable(
            f"reuse={reuse} needs LMCache, which {site.python} lacks: pip install lmcache"
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


def _mooncake_words(ports: StorePorts, is_cpu: bool) -> list[str]:
    return [
        *("-m", "mooncake.cli"),
        *(f"--rpc_address={LOOPBACK}", f"--rpc_port={ports.requests}"),
        *(f"--metrics_host={LOOPBACK}", f"--metrics_port={ports.http}"),
    ]


def _mooncake_engine(ports: StorePorts, is_cpu: bool) -> Wiring:
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"{LOOPBACK}:{ports.requests}",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": _store_gib(is_cpu) * _GIB,
        "local_buffer_size": _GIB // 4 if is_cpu else _GIB,
    }
    return Wiring(
        _timed_config("MooncakeStoreConnector", {"lookup_rpc_port": ports.requests}),
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


def _lmcache_words(ports: StorePorts, is_cpu: bool) -> list[str]:
    metrics = ("--prometheus-port", str(ports.metrics))
    return _lmcache_server(ports.requests, ports.http, str(_store_gib(is_cpu)), *metrics)


def _moving_words(ports: StorePorts, is_cpu: bool) -> list[str]:
    """Of a server that keeps nothing that it is given."""
    plugin = _l2(is_cpu, peers=[f"{LOOPBACK}:{ports.far_chunks}"], copies="moved")
    return [*_lmcache_words(ports, is_cpu), "--l2-store-policy", "skip_l1", *plugin]


def _far_words(ports: StorePorts, is_cpu: bool) -> list[str]:
    plugin = _l2(is_cpu, listen=f"{LOOPBACK}:{ports.far_chunks}")
    more = ("--disable-observability", *plugin)
    return _lmcache_server(ports.far_requests, ports.far_http, _FAR_L1_GIB, *more)


def _l2(is_cpu: bool, **params: Any) -> tuple[str, str]:
    page_bytes = _CPU_PAGE_BYTES if is_cpu else _GPU_PAGE_BYTES
    sizes = {"page_bytes": page_bytes, "storage_bytes": _NUM_PAGES * page_bytes}
    plugin = {
        "type": "plugin",
        "module_path": "kvxfer.connectors.lmcache.mp",
        "class_name": "KvxferL2",
        "adapter_params": sizes | params,
    }
    return ("--l2-adapter", json.dumps(plugin))


def _lmcache_server(requests: int, http: int, l1_gib: str, *more: str) -> list[str]:
    options = {
        "--host": LOOPBACK,
        "--port": str(requests),
        "--http-host": LOOPBACK,
        "--http-port": str(http),
        "--l1-size-gb": l1_gib,
        "--chunk-size": str(LMCACHE_CHUNK_TOKENS),
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "auto",
    }
    # Not by its command line's module, which does nothing when it is run in 0.5.2.
    pairs = (word for pair in options.items() for word in pair)
    return ["-m", _LMCACHE_SERVER, *pairs, *more]


def _lmcache_engine(ports: StorePorts, is_cpu: bool) -> Wiring:
    extra = {"lmcache.mp.host": f"tcp://{LOOPBACK}", "lmcache.mp.port": ports.requests}
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


def _moving_held(page: str) -> Held | None:
    """Objects that were ever moved; what is still here is on its way there, or being read."""
    here = _lmcache_held(page)
    counts = {name: int(value) for name, value in _PLUGIN_COUNTS.findall(page)}
    if here is None or len(counts) < len(_COUNTED):
        return None
    moved, far, near = (counts[name] for name in _COUNTED)
    return Held(moved, is_busy=here.is_busy or here.num_objects > 0, num_far=far, num_near=near)


_MOONCAKE_ITEMS: Final = re.compile(
    r"^master_batch_put_(start|start_failed|end|revoke)_items_total ([0-9]{1,15})$", re.MULTILINE
)
_LMCACHE_COUNTS: Final = {
    "total": re.compile(r'"total_object_count": ?([0-9]{1,15})\b'),
    "locked": re.compile(r'"write_locked_count": ?([0-9]{1,15})\b'),
}
_COUNTED: Final = ("moved_to_peers", "read_from_peers", "found_here")
_PLUGIN_COUNTS: Final = re.compile(rf'"({"|".join(_COUNTED)})": ?([0-9]{{1,15}})\b')
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
    "lmcache-far": Store(
        _moving_words,
        "/healthcheck",
        "/status",
        _moving_held,
        _lmcache_engine,
        _LMCACHE_ENVIRONMENT,
        _far_words,
    ),
}


def wire_reuse(reuse: Reuse, ports: StorePorts, *, is_cpu: bool) -> Wiring:
    """How an engine is told where the KV of earlier prompts is."""
    if reuse == "none":
        return Wiring(("--no-enable-prefix-caching",))
    if reuse not in STORES:
        return Wiring()
    wiring = STORES[reuse].engine(ports, is_cpu)
    # In that mode its own prefix cache can be dropped, so that hits can only come from the store.
    besides = {"KVXFER_TIMINGS": TIMINGS, "VLLM_SERVER_DEV_MODE": "1"}
    return replace(wiring, environment={**wiring.environment, **besides})


def has_far_store(reuse: Reuse) -> bool:
    """Whether hits are to come from a store that the one beside the engine reads from."""
    return reuse in STORES and STORES[reuse].far_words is not None


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
