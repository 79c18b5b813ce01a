"""The one place that reads the environment."""

import os
from collections.abc import Mapping
from pathlib import Path


def child_environment(
    fixed: Mapping[str, str], defaults: Mapping[str, str] | None = None
) -> dict[str, str]:
    """All variables for a program that is started.

    Args:
        fixed: variables with these values, whatever they are here.
        defaults: variables that get these values where they are not set here.
    """
    return {**(defaults or {}), **os.environ, **fixed}


def visible_devices() -> tuple[str, ...] | None:
    """The items of ``CUDA_VISIBLE_DEVICES``; None where it is not set."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else tuple(item.strip() for item in text.split(",") if item.strip())


def tuning_setting() -> str:
    """``KVXFER_TUNING``: the absolute path of a tuning profile, or ``off``; empty where not set."""
    return os.environ.get("KVXFER_TUNING", "")


def config_home() -> Path | None:
    """Where this user's programs have their settings: ``XDG_CONFIG_HOME``, or ``~/.config``.

    None for a user without a home.
    """
    named = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if named.is_absolute():  # a relative one is to be ignored, by the XDG specification
        return named
    try:
        return Path.home() / ".config"
    except RuntimeError:
        return None


def accelerates_nixl() -> bool:
    """Whether ``KVXFER_ACCELERATE_NIXL`` is 1: vLLM's NIXL agents are to be accelerated ones."""
    return os.environ.get("KVXFER_ACCELERATE_NIXL") == "1"


def timings_file() -> Path | None:
    """``KVXFER_TIMINGS``: where timed connectors write what happened when; None where not set."""
    named = os.environ.get("KVXFER_TIMINGS")
    return Path(named) if named else None


def digests_file() -> Path | None:
    """``KVXFER_DIGESTS``: where vLLM's workers write digests of KV that is handed over; None where
    not set."""
    named = os.environ.get("KVXFER_DIGESTS")
    return Path(named) if named else None
