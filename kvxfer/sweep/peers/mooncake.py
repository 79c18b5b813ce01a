"""`mooncake`: Mooncake's transfer engine by its Python API, over TCP."""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from kvxfer.errors import NotAvailable, TransferFailed
from kvxfer.layout import CopyPlan
from kvxfer.sweep.patterned_cache import PatternedCache
from kvxfer.sweep.peers.library import HOST, Ends, FarSide, Mover, PeerLibrary, Row
from kvxfer.sweep.peers.pages import pages_of
from kvxfer.sweep.peers.threads import parts_of
from kvxfer.transport import Op, Transfer
from kvxfer.transport.base import FinishedTransfer

_HOST_NAME = "127.0.0.1"
_PROTOCOL = "tcp"
# A call of more pages than its queues hold fails: 0.3.13 takes 2048 and refuses 16384.
_PAGES_A_CALL = 1024
_PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")


class Mooncake(PeerLibrary):
    """One engine in each process, which find each other by address."""

    name = "mooncake"
    memory = HOST
    modules = ("mooncake",)
    install = "pip install mooncake-transfer-engine-non-cuda"

    def connect(self, ends: Ends, row: Row) -> Mover:
        """An engine that starts batches."""
        return _MooncakeMover(ends)

    def serve(self, pool: PatternedCache, row: Row) -> FarSide:
        """An engine that answers; its port is the contact."""
        engine = _open_engine(pool.start_address, pool.num_bytes)
        return _MooncakeFarSide(engine)


class _MooncakeFarSide(FarSide):
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        super().__init__(str(engine.get_rpc_port()).encode())

    def close(self) -> None:
        self._engine = None


class _MooncakeMover(Mover):
    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._engine = _open_engine(ends.near_address, ends.num_bytes)
        self._target = f"{_HOST_NAME}:{ends.contact.decode()}"
        self._name = f"batch_transfer_sync_{'write' if ends.op is Op.PUT else 'read'}"
        self._move = getattr(self._engine, self._name)
        said = (f"mooncake {_version()}", f"protocol {_PROTOCOL}", self._name)
        self.settings = ", ".join((*said, f"{_PAGES_A_CALL} pages a call"))

    def ready(self, plan: CopyPlan) -> Callable[[], Transfer]:
        ends, pages = self._ends, pages_of(plan, self._ends.page_bytes)
        near, far = (pages.src, pages.dst) if ends.op is Op.PUT else (pages.dst, pages.src)
        moved = np.uint64((ends.far_address - ends.mapped_address) % (1 << 64))
        lists = (near.tolist(), (far + moved).tolist(), [pages.page_bytes] * near.size)
        calls = [[one[part] for one in lists] for part in parts_of(near.size, _PAGES_A_CALL)]

        def start() -> Transfer:
            for call in calls:
                status = self._move(self._target, *call)
                if status:
                    raise TransferFailed(f"{self._name} ended with status {status}")
            return FinishedTransfer(plan.total_bytes, f"{_PROTOCOL}, {self._name}")

        return start

    def close(self) -> None:
        self._engine = self._move = None


def _open_engine(address: int, num_bytes: int) -> Any:
    """An engine that has registered a pool.

    Raises:
        NotAvailable: it cannot be loaded, or refuses.
    """
    try:
        engine = import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise NotAvailable(f"mooncake cannot be imported: {error}") from error
    status = engine.initialize(_HOST_NAME, "P2PHANDSHAKE", _PROTOCOL, "")
    if status:
        raise NotAvailable(f"mooncake does not start over {_PROTOCOL}: status {status}")
    status = engine.register_memory(address, num_bytes)
    if status:
        raise NotAvailable(f"mooncake does not register {num_bytes} bytes: status {status}")
    return engine


def _version() -> str:
    for name in _PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"
