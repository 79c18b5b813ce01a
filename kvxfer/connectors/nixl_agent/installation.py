"""Puts the accelerated agent in the place of NIXL's, in this process.

NIXL has no hook for it, so `install` rebinds the class's name in its module, and in every module
that has taken it from there, after it has checked version and signatures. No file changes.
"""

import inspect
import logging
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from kvxfer.errors import NotAvailable
from kvxfer.transport.nixl.api import load_api

_log = logging.getLogger(__name__)
VERSIONS = ("1.5.1",)
"""Releases of NIXL on which this was run."""

# What is overridden, with the names of its parameters.
SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "__init__": ("self", "agent_name", "nixl_conf", "instantiate_all"),
    "register_memory": ("self", "reg_list", "mem_type", "backends"),
    "deregister_memory": ("self", "dereg_list", "backends"),
    "get_agent_metadata": ("self",),
    "get_partial_agent_metadata": ("self", "descs", "inc_conn_info", "backends"),
    "add_remote_agent": ("self", "metadata"),
    "remove_remote_agent": ("self", "agent"),
    "prep_xfer_dlist": ("self", "agent_name", "xfer_list", "mem_type", "backends"),
    "make_prepped_xfer": (
        "self",
        "operation",
        "local_xfer_side",
        "local_indices",
        "remote_xfer_side",
        "remote_indices",
        "notif_msg",
        "backends",
        "skip_desc_merge",
    ),
    "initialize_xfer": (
        "self",
        "operation",
        "local_descs",
        "remote_descs",
        "remote_agent",
        "notif_msg",
        "backends",
    ),
    "transfer": ("self", "handle", "notif_msg"),
    "check_xfer_state": ("self", "handle"),
    "get_xfer_telemetry": ("self", "handle"),
}
_NAME = "nixl_agent"


def install() -> None:
    """Let whatever makes a ``nixl_agent`` in this process from now on get an accelerated one.

    That is vLLM's NixlConnector, LMCache, SGLang and any program on NIXL's Python API. Agents that
    exist stay what they are. A second call changes nothing.

    Raises:
        NotAvailable: NIXL is not installed, or is a release that is not known here.
    """
    api = load_api(with_logging=True)  # the program is one of NIXL's
    stock = getattr(api, _NAME)
    package = api.__name__.partition(".")[0]
    if getattr(stock, "acceleration", None) is not None:
        return
    found = complaints(_version(package), stock)
    if found:
        raise NotAvailable(
            f"this NIXL is not known here: {'; '.join(found)}; use a known one or a newer kvxfer"
        )
    from kvxfer.connectors.nixl_agent.agent import AcceleratedAgent

    num_places = _rebind(stock, AcceleratedAgent)
    _log.info("NIXL's agent is accelerated by kvxfer in %d modules", num_places)


def complaints(version: str, agent: type) -> list[str]:
    """What of a NIXL is not as it was where this was run.

    Args:
        version: of the release.
        agent: its class of agents.
    """
    texts = []
    if version not in VERSIONS:
        texts.append(f"its version is {version}; known are {', '.join(VERSIONS)}")
    for name, wanted in SIGNATURES.items():
        method = getattr(agent, name, None)
        if method is None:
            texts.append(f"it has no {name}")
            continue
        found = tuple(inspect.signature(method).parameters)
        if found != wanted:
            texts.append(f"{name} takes {', '.join(found)}")
    return texts


def _version(package: str) -> str:
    for name in (package, "nixl"):
        try:
            return metadata.version(name.replace("_", "-"))
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _rebind(stock: type, better: type) -> int:
    """Give every module-level name of ``stock`` to ``better``, but for our own bases."""
    num_places = 0
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] == "kvxfer":
            continue
        places: dict[str, Any] = getattr(module, "__dict__", {})
        for key, value in list(places.items()):
            if value is stock:
                places[key] = better
                num_places += 1
    return num_places
