"""What the GPU tests need of a machine, and why they are skipped where it is not there."""

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvxfer import _core


def skip_reason(num_gpus: int) -> str:
    """Why tests on ``num_gpus`` GPUs cannot run here; empty where they can."""
    found = _core.device_count()
    if found == 0:
        return f"no GPU: {_core.no_device_reason()}"
    if found < num_gpus:
        return f"needs {num_gpus} GPUs; this machine has {found}"
    if num_gpus > 1 and not (_core.can_access_peer(0, 1) and _core.can_access_peer(1, 0)):
        return "GPUs 0 and 1 have no peer access"
    return ""


def mark(items: list[pytest.Item], folder: Path, marker: str, num_gpus: int) -> None:
    """Mark the tests of a folder, and skip them where the machine has too few GPUs."""
    reason = skip_reason(num_gpus)
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(marker)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def array_library(name: str) -> Any:
    """torch or cupy, or a skip where it is not installed."""
    try:
        # Both warn at import about what they found of each other; that is no fault of kvxfer.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed: {error}")


def require_memory(memory: str) -> None:
    """Skip where the library that owns such memory is not installed."""
    library = memory.partition("-")[0]
    if library in ("torch", "cupy"):
        array_library(library)
