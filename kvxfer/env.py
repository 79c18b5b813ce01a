"""The one place that reads the environment."""

import os
from collections.abc import Mapping


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
