"""The scripts of ``bench/`` as modules."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_BENCH = Path(__file__).resolve().parents[2] / "bench"


def script(name: str) -> Path:
    """Where ``bench/NAME.py`` is."""
    return _BENCH / f"{name}.py"


def load_script(name: str) -> Any:
    """It as a module."""
    spec = spec_from_file_location(name, script(name))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module
