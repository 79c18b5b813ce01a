"""`nixl`: NIXL's Python API over UCX, with prepared lists of descriptors, one a page."""

import importlib
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import NotAvailable, TransferFailed
from kvxfer.layout import CopyPlan
from kvxfer.sweep.patterned_cache import PatternedCache
from kvxfer.sweep.peers.cuda_driver import load_driver, use_device
from kvxfer.sweep.peers.library import HOST, Ends, FarSide, Mover, PeerLibrary, Row
from kvxfer.sweep.peers.pages import Addresses, pages_of
from kvxfer.transport import Op, Transfer

# The meta package, then what it stands for.
_MODULES = ("nixl", "nixl_cu13", "nixl_cu12")
_OWN = "NIXL_INIT_AGENT"
_SGL = "NIXL_UCX_SGL_ENABLE"


class Nixl(PeerLibrary):
    """NIXL as it comes, and by the best settings known.

    On GPUs these are UCX's batches of copies (NIXL_UCX_SGL_ENABLE). In host memory it is no
    progress thread on the side that starts copies: on two CPUs that doubles the rate, over the same
    path, cross-memory attach. No error handling of endpoints adds some per cent.
    """

    name = "nixl"
    memory = (*HOST, "device")
    modules = _MODULES
    install = "pip install nixl-cu13 torch"

    @property
    def rows(self) -> tuple[Row, ...]:
        """Both."""
        return (
            Row("nixl", {_SGL: None}),
            Row("nixl-tuned", {_SGL: "1"}, tuned=True),
        )

    def connect(self, ends: Ends, row: Row) -> Mover:
        """An agent that starts transfers."""
        return _NixlMover(ends, row)

    def serve(self, pool: PatternedCache, row: Row) -> FarSide:
        """An agent that makes its own progress."""
        device = pool.cache.device
        agent = _open_agent("far", device, tuned=row.tuned, starts=False)
        _register(agent, pool.start_address, pool.num_bytes, device)
        return _NixlFarSide(agent)


class _NixlFarSide(FarSide):
    def __init__(self, agent: Any) -> None:
        self._agent = agent
        super().__init__(agent.get_agent_metadata())

    def close(self) -> None:
        self._agent = None


class _NixlMover(Mover):
    def __init__(self, ends: Ends, row: Row) -> None:
        self._ends = ends
        self._op = "WRITE" if ends.op is Op.PUT else "READ"
        device = ends.near_device
        self._agent = _open_agent("near", device, tuned=row.tuned, starts=True)
        _register(self._agent, ends.near_address, ends.num_bytes, device)
        far = self._agent.add_remote_agent(ends.contact)
        memory = _memory(device)
        own = _descriptors(ends.near_address, ends, device)
        other = _descriptors(ends.far_address, ends, ends.far_device)
        self._lists = (
            self._agent.prep_xfer_dlist(_OWN, own, memory),
            self._agent.prep_xfer_dlist(far, other, memory),
        )
        self._handle: Any = None
        self.settings = _settings(self._op, device, tuned=row.tuned)

    def ready(self, plan: CopyPlan) -> Callable[[], Transfer]:
        ends, pages = self._ends, pages_of(plan, self._ends.page_bytes)
        near, far = (pages.src, pages.dst) if ends.op is Op.PUT else (pages.dst, pages.src)
        self._release()
        self._handle = handle = self._agent.make_prepped_xfer(
            self._op,
            self._lists[0],
            _indices(near, ends.near_address, pages.page_bytes),
            self._lists[1],
            _indices(far, ends.mapped_address, pages.page_bytes),
        )
        return lambda: _NixlTransfer(self._agent, handle, plan.total_bytes, f"UCX {self._op}")

    def _release(self) -> None:
        if self._handle is not None:
            self._agent.release_xfer_handle(self._handle)
            self._handle = None

    def close(self) -> None:
        if self._agent is None:
            return
        self._release()
        for prepared in self._lists:
            self._agent.release_dlist_handle(prepared)
        self._agent = None


class _NixlTransfer(Transfer):
    sequence = 0

    def __init__(self, agent: Any, handle: Any, num_bytes: int, path: str) -> None:
        self._agent, self._handle = agent, handle
        self.num_bytes, self.actual_path = num_bytes, path
        self._state = agent.transfer(handle)

    def poll(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._state == "PROC":
            if time.monotonic() >= deadline:
                return False
            self._state = self._agent.check_xfer_state(self._handle)
        if self._state != "DONE":
            raise TransferFailed(f"NIXL ended a transfer as {self._state}")
        return True


def _settings(op: str, device: int, *, tuned: bool) -> str:
    said = [f"nixl {_version()}", "UCX", f"{op} of prepared lists"]
    if not tuned:
        said.append("defaults")
    else:
        said.append(f"{_SGL}=1")
        if device < 0:
            said += ["ucx_error_handling_mode=none", "no progress thread here"]
    return ", ".join(said)


def _open_agent(name: str, device: int, *, tuned: bool, starts: bool) -> Any:
    """An agent with a UCX back end, in the GPU's context where there is one.

    Raises:
        NotAvailable: NIXL cannot be loaded, or its UCX does not start.
    """
    api = _load()
    if device >= 0:  # UCX offers no path between GPUs to a thread without a context
        use_device(load_driver(), device)
    alone = tuned and device < 0
    config = api.nixl_agent_config(enable_prog_thread=not (alone and starts), backends=[])
    try:
        agent = api.nixl_agent(f"kvxfer-{name}", config)
        agent.create_backend("UCX", {"ucx_error_handling_mode": "none"} if alone else {})
    except Exception as error:  # its bindings have exceptions of their own
        raise NotAvailable(f"NIXL does not start: {error}") from error
    return agent


def _load() -> Any:
    failure = ""
    for name in _MODULES:
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError as error:
            if error.name != name:
                failure = str(error)
    raise NotAvailable(f"NIXL cannot be imported: {failure or 'it is not installed'}")


def _version() -> str:
    for name in _MODULES:
        try:
            return version(name.replace("_", "-"))
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _memory(device: int) -> str:
    return "DRAM" if device < 0 else "VRAM"


def _register(agent: Any, address: int, num_bytes: int, device: int) -> None:
    agent.register_memory([(address, num_bytes, max(device, 0), "")], _memory(device))


def _descriptors(address: int, ends: Ends, device: int) -> NDArray[np.uint64]:
    """Every page of a pool, uint64 ``[num_pages, 3]``: address, length, device."""
    count = ends.num_bytes // ends.page_bytes
    rows = np.empty((count, 3), np.uint64)
    rows[:, 0] = np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(ends.page_bytes)
    rows[:, 1] = ends.page_bytes
    rows[:, 2] = max(device, 0)
    return rows


def _indices(addresses: Addresses, start: int, page_bytes: int) -> NDArray[np.int32]:
    """Which page of the pool each address is."""
    indices: NDArray[np.int32] = ((addresses - np.uint64(start)) // page_bytes).astype(np.int32)
    return indices
