"""NIXL's Python API, found and kept from this process's logging."""

import functools
import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from kvxfer.errors import NotAvailable

# The meta package, then what it stands for.
_MODULES = ("nixl", "nixl_cu13", "nixl_cu12")


@functools.cache
def load_api(*, with_logging: bool = False) -> Any:
    """NIXL's Python API.

    Args:
        with_logging: let it set up `logging` as it does for programs of its own.

    Raises:
        NotAvailable: it is not installed, or does not load.
    """
    failure = ""
    for name in _MODULES:
        try:
            with nullcontext() if with_logging else _own_logging():
                return importlib.import_module(f"{name}._api")
        except ImportError as error:
            if error.name != name:
                failure = str(error)
    if failure:
        raise NotAvailable(f"NIXL cannot be imported: {failure}")
    raise NotAvailable("NIXL is not installed; pip install nixl-cu13")


@contextmanager
def _own_logging() -> Iterator[None]:
    """Undo what NIXL does to `logging`: what it says goes to standard output, which is not ours."""
    raises = logging.raiseExceptions
    had_handlers = bool(logging.getLogger("nixl").handlers)
    try:
        yield
    finally:
        logging.raiseExceptions = raises
        if not had_handlers:
            logger = logging.getLogger("nixl")
            logger.handlers.clear()
            logger.propagate = True
            logger.setLevel(logging.NOTSET)  # the program's own level decides
