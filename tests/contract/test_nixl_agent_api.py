"""The accelerated agent has NIXL's whole API, and gets into the place of NIXL's class."""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from typing import Any

import pytest

if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu13", "nixl_cu12")):
    pytest.skip("NIXL is not installed", allow_module_level=True)

from kvxfer.connectors.nixl_agent import AcceleratedAgent
from kvxfer.transport.nixl.api import load_api

_STOCK: Any = load_api().nixl_agent


def surface(kind: type) -> dict[str, list[tuple[str, Any, bool]]]:
    """Public methods, and of each parameter its name, its kind, and whether it has a default."""
    found = {}
    for name, method in inspect.getmembers(kind, callable):
        if name == "__init__" or not name.startswith("_"):
            found[name] = [
                (one.name, one.kind, one.default is not one.empty)
                for one in inspect.signature(method).parameters.values()
            ]
    return found


def test_nixl_agent_has_the_whole_api() -> None:
    assert surface(AcceleratedAgent) == surface(_STOCK)


def test_nixl_agent_api_check_sees_a_changed_method() -> None:
    class Changed(AcceleratedAgent):  # type: ignore[misc,valid-type]
        def transfer(self, handle: Any) -> str:
            return "DONE"

    assert surface(Changed) != surface(_STOCK)


def test_nixl_agent_keeps_defaults() -> None:
    for name, method in inspect.getmembers(_STOCK, inspect.isfunction):
        if name.startswith("_") and name != "__init__":
            continue
        ours = inspect.signature(getattr(AcceleratedAgent, name)).parameters
        for one in inspect.signature(method).parameters.values():
            # An empty list and an empty tuple of back ends say the same.
            assert ours[one.name].default == one.default or not (
                ours[one.name].default or one.default
            ), (name, one)


def test_nixl_agent_handles_are_those_of_nixl() -> None:
    from kvxfer.connectors.nixl_agent.handles import ListHandle, TransferHandle

    assert issubclass(TransferHandle, load_api().nixl_xfer_handle)
    assert issubclass(ListHandle, load_api().nixl_prepped_dlist_handle)


def test_nixl_agent_of_all_back_ends_ends_as_nixl_does() -> None:
    def outcome(kind: Any, name: str) -> Any:
        try:
            return list(kind(name, None, True).backends)
        except load_api().nixlBind.nixlBackendError as error:  # one that needs settings
            return str(error)

    assert outcome(AcceleratedAgent, "ours") == outcome(_STOCK, "stock")


_INSTALLED = """
import json, sys, types
from {package}._api import nixl_agent as taken_before
user = types.ModuleType("user")
user.Agent = taken_before
sys.modules["user"] = user
from kvxfer.connectors.nixl_agent import AcceleratedAgent, install
install()
install()
import {package}._api
from {package}._api import nixl_agent
print(json.dumps([kind is AcceleratedAgent for kind in (
    nixl_agent, user.Agent, {package}._api.nixl_agent, taken_before)]))
"""


def run(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_nixl_agent_install_reaches_every_module() -> None:
    package = load_api().__name__.partition(".")[0]
    done = run(_INSTALLED.format(package=package))
    assert done.returncode == 0, done.stderr
    # This program's own name was found too: it is a module as any other.
    assert json.loads(done.stdout.splitlines()[-1]) == [True] * 4


_UNKNOWN = """
import kvxfer.connectors.nixl_agent.installation as module
module.VERSIONS = ("0.0",)
module.install()
"""


def test_nixl_agent_install_refuses_an_unknown_release() -> None:
    done = run(_UNKNOWN)
    assert done.returncode != 0
    assert "NotAvailable: this NIXL is not known here: its version is" in done.stderr


_PLUGGED = """
import sys, types
names = types.ModuleType("vllm.distributed.nixl_utils")
def load(name):
    if name != "NixlWrapper":
        raise AttributeError(name)
    from {package}._api import nixl_agent
    vars(names)[name] = nixl_agent
    return nixl_agent
names.__getattr__ = load
for name in ("vllm", "vllm.distributed"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[names.__name__] = names
from kvxfer.connectors.nixl_agent.plugin import register
register()
print(names.NixlWrapper.__name__)
"""


@pytest.mark.parametrize(
    ("value", "name"), [("1", "AcceleratedAgent"), ("0", "nixl_agent"), ("", "nixl_agent")]
)
def test_nixl_agent_plug_in_gets_under_vllm(value: str, name: str) -> None:
    package = load_api().__name__.partition(".")[0]
    done = run(_PLUGGED.format(package=package), KVXFER_ACCELERATE_NIXL=value)
    assert done.stdout.splitlines()[-1] == name, done.stderr


def test_nixl_agent_plug_in_leaves_an_unknown_nixl_with_a_warning() -> None:
    package = load_api().__name__.partition(".")[0]
    unknown = "import kvxfer.connectors.nixl_agent.installation as m\nm.VERSIONS = ('0.0',)\n"
    done = run(unknown + _PLUGGED.format(package=package), KVXFER_ACCELERATE_NIXL="1")
    assert done.stdout.splitlines()[-1] == "nixl_agent"
    assert "NIXL is not accelerated: this NIXL is not known here" in done.stderr
