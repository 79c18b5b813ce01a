"""How kvxfer gets into LMCache: its factory of channels and its PD back ends, in this process.

LMCache has no hook for either (its factory takes two names), so `install` rebinds names in its
modules after it has checked version and signatures. No file changes.
"""

import importlib
import inspect
import logging
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from kvxfer.errors import NotAvailable

_log = logging.getLogger(__name__)
VERSIONS = ("0.5.2", "0.5.6")
"""Releases of LMCache on which this was run."""

_V1 = "lmcache.v1."
_FACTORY = _V1 + "transfer_channel"
_ASYNC = _V1 + "storage_backend.pd_backend_async"
_SYNC = _V1 + "storage_backend.pd_backend"
_P2P = _V1 + "storage_backend.p2p_backend"
_ENGINE = _V1 + "cache_engine"
_USERS = (_FACTORY, _ASYNC, _SYNC, _P2P)

# What is called or overridden, with the names of its parameters.
SIGNATURES: Mapping[str, tuple[str, ...]] = {
    f"{_FACTORY}:CreateTransferChannel": (
        "channel_type",
        "async_mode",
        "role",
        "buffer_ptr",
        "buffer_size",
        "align_bytes",
        "tp_rank",
        "peer_init_url",
        "device",
        "kwargs",
    ),
    f"{_ENGINE}:LMCacheEngine.store": ("self", "tokens", "hashes", "offsets", "mask", "kwargs"),
    f"{_ASYNC}:PDBackendAsync.__init__": ("self", "config", "metadata"),
    f"{_ASYNC}:PDBackendAsync._init_receiver": ("self",),
    f"{_ASYNC}:PDBackendAsync._async_remote_allocate": ("self", "receiver_id", "alloc_request"),
    f"{_ASYNC}:PDBackendAsync._abort_request": ("self", "req_id"),
    f"{_ASYNC}:PDBackendAsync._ensure_peer_connection": (
        "self",
        "receiver_id",
        "receiver_host",
        "receiver_init_port",
        "receiver_alloc_port",
    ),
    f"{_SYNC}:PDBackend.__init__": ("self", "config", "metadata"),
    f"{_SYNC}:PDBackend._init_sender": ("self",),
    f"{_SYNC}:PDBackend._init_receiver": ("self",),
    f"{_SYNC}:PDBackend._remote_allocate": ("self", "receiver_id", "alloc_request"),
    f"{_SYNC}:PDBackend._ensure_peer_connection": (
        "self",
        "receiver_id",
        "receiver_host",
        "receiver_init_port",
        "receiver_alloc_port",
    ),
}


class _Installed:
    """What this process has; one, as LMCache's modules are."""

    is_done = False
    upgrades = False


def install(*, upgrade: bool = False) -> None:
    """Let LMCache's PD and P2P in this process use kvxfer's channel.

    Bare, it acts on engines with ``transfer_channel: kvxfer``; what has ``nixl`` keeps LMCache's
    own channel. A second call changes nothing but, where it says so, ``upgrade``.

    Args:
        upgrade: act on ``transfer_channel: nixl`` too.

    Raises:
        NotAvailable: LMCache is not installed, or is a release that is not known here.
    """
    if not _Installed.is_done:
        _require_known()
        _rebind()
        _Installed.is_done = True
    _Installed.upgrades = _Installed.upgrades or upgrade


def acts_on(transfer_channel: str | None) -> bool:
    """Whether an engine of that setting gets kvxfer's channel."""
    return transfer_channel == "kvxfer" or (_Installed.upgrades and transfer_channel == "nixl")


def complaints(version: str, find: Any) -> list[str]:
    """What of an LMCache is not as it was where this was run.

    Args:
        version: of the release.
        find: returns the function behind a name of `SIGNATURES`; raises AttributeError or
            ImportError where there is none.
    """
    texts = []
    if version.partition("+")[0] not in VERSIONS:
        texts.append(f"its version is {version}; known are {', '.join(VERSIONS)}")
    for name, wanted in SIGNATURES.items():
        try:
            found = tuple(inspect.signature(find(name)).parameters)
        except (AttributeError, ImportError) as error:
            texts.append(f"it has no {name.partition(':')[2]} ({error})")
            continue
        if found != wanted:
            texts.append(f"{name.partition(':')[2]} takes {', '.join(found)}")
    return texts


def _require_known() -> None:
    try:
        version = metadata.version("lmcache")
    except metadata.PackageNotFoundError as error:
        raise NotAvailable(f"LMCache is not installed; use one of {', '.join(VERSIONS)}") from error
    found = complaints(version, _find)
    if found:
        raise NotAvailable(
            f"this LMCache is not known here: {'; '.join(found)}; use a known one or a newer kvxfer"
        )


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _rebind() -> None:
    from kvxfer.connectors.lmcache.channel import KvxferChannel
    from kvxfer.connectors.lmcache.pd_async import KvxferPDBackendAsync
    from kvxfer.connectors.lmcache.pd_common import pages_of_sender
    from kvxfer.connectors.lmcache.pd_sync import KvxferPDBackend
    from kvxfer.connectors.lmcache.splitting import splitting

    stock = _find(f"{_FACTORY}:CreateTransferChannel")

    signature = inspect.signature(stock)

    def create(*args: Any, **kwargs: Any) -> Any:
        """LMCache's factory, with one channel more."""
        given = signature.bind(*args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        if not acts_on(given["channel_type"]):
            return stock(**given)
        return KvxferChannel(
            async_mode=given["async_mode"],
            buffer_ptr=given["buffer_ptr"],
            buffer_size=given["buffer_size"],
            align_bytes=given["align_bytes"],
            peer_init_url=given["peer_init_url"],
            device=given.get("device"),
            peer_lookup_url=given.get("peer_lookup_url"),
            make_stock=lambda: stock(**{**given, "channel_type": "nixl", "peer_init_url": None}),
        )

    for name in _USERS:
        if name in sys.modules or name == _FACTORY:
            vars(importlib.import_module(name))["CreateTransferChannel"] = create
    _prefer(_find(f"{_ASYNC}:PDBackendAsync"), KvxferPDBackendAsync)
    _prefer(_find(f"{_SYNC}:PDBackend"), KvxferPDBackend)
    _pass_options(_find(f"{_P2P}:P2PBackend"))
    engine = _find(f"{_ENGINE}:LMCacheEngine")
    engine.store = splitting(engine.store, pages_of_sender)
    _log.info("LMCache %s uses kvxfer's channel", metadata.version("lmcache"))


def _pass_options(base: type) -> None:
    """Let the channel of a ``base(config, metadata, ...)`` have the settings of its config."""
    from kvxfer.connectors.lmcache.options import read_options
    from kvxfer.connectors.lmcache.setting import Setting, constructing

    init = base.__init__  # type: ignore[misc]

    def init_with_options(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        acts = acts_on(config.transfer_channel)
        with constructing(Setting(options=read_options(config.extra_config if acts else None))):
            init(self, config, *args, **kwargs)

    base.__init__ = init_with_options  # type: ignore[misc]


def _prefer(base: type, better: type) -> None:
    """Make ``base(config, metadata)`` a ``better`` where the config asks for kvxfer."""

    def new(cls: type, config: Any, *_: Any, **__: Any) -> Any:
        wanted = better if cls is base and acts_on(config.transfer_channel) else cls
        return object.__new__(wanted)

    base.__new__ = new  # type: ignore[assignment]
