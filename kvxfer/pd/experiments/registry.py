"""Experiments by name. Each is a module, or a package, with an ``EXPERIMENT``."""

from importlib import import_module
from typing import Final

from kvxfer.errors import InvalidUsage
from kvxfer.pd.experiments.base import Experiment

_MODULES: Final = {
    "agg-vs-pd": "agg_vs_pd",
    "gpu-count": "gpu_count",
    "kv-reuse": "kv_reuse",
    "kv-size": "kv_size",
    "goodput": "goodput",
    "batching": "batching",
    "user-load": "user_load",
}


def names() -> list[str]:
    """All of them, in the order of the articles' questions."""
    return list(_MODULES)


def find_experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        InvalidUsage: there is none.
    """
    if name not in _MODULES:
        raise InvalidUsage(f"no experiment {name!r}; use one of {', '.join(_MODULES)}")
    found: Experiment = import_module(f"kvxfer.pd.experiments.{_MODULES[name]}").EXPERIMENT
    return found
