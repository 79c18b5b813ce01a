"""The ways in which CPU threads carry a plan: two kinds of stores, and cross-memory attach."""

import functools
import os

import numpy as np
import pytest
from copy_boxes import CopyBox, core_tables

from kvxfer import _core
from kvxfer.errors import NotAvailable


@functools.lru_cache
def pool(num_threads: int) -> _core.WorkerPool:
    return _core.WorkerPool(num_threads)


def copy(tables: _core.PlanTables, engine: str, num_threads: int) -> None:
    """``read`` and ``write`` are cross-memory attach to this same process."""
    team = pool(num_threads)
    if engine in ("read", "write"):
        _core.paged_copy_process_vm(team, tables, os.getpid(), engine == "write")
    else:
        _core.paged_copy_host(team, tables, engine == "streaming")


def _why_no_attach() -> str:
    """Why this host lets no process reach another's memory; empty where it does."""
    memory = np.zeros(2, np.uint8)
    addresses = np.array([memory.ctypes.data], np.uint64)
    segments = np.zeros((1, 4), np.uint32)
    tables = core_tables(addresses, addresses + np.uint64(1), segments, [CopyBox(0, 1, 0, 1)])
    try:
        copy(tables, "read", 1)
    except NotAvailable as error:
        return str(error)
    return ""


NO_ATTACH = _why_no_attach()
POSSIBLE = ["memcpy", "streaming"] + ([] if NO_ATTACH else ["read", "write"])
needs_attach = pytest.mark.skipif(bool(NO_ATTACH), reason=NO_ATTACH or "possible here")
ENGINES = [
    "memcpy",
    "streaming",
    pytest.param("read", marks=needs_attach),
    pytest.param("write", marks=needs_attach),
]
