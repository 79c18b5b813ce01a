"""LMCache's multiprocess server on kvxfer: an L2 plug-in, whose import registers the channel too.

``--l2-adapter '{"type": "plugin", "module_path": "kvxfer.connectors.lmcache.mp", "class_name":
"KvxferL2", "adapter_params": {"page_bytes": ...}}'``, and ``--p2p-transfer-engine kvxfer``.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import msgspec
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from msgspec import Meta

from kvxfer.connectors.lmcache.chunk_store import ChunkStore
from kvxfer.connectors.lmcache.mp_channel import register
from kvxfer.connectors.lmcache.page_store import Form
from kvxfer.connectors.lmcache.storage import bytes_of
from kvxfer.errors import InvalidUsage

try:
    from lmcache.lmcache_native import Bitmap
except ImportError:  # LMCache 0.5.2
    from lmcache.native_storage_ops import Bitmap

_log = logging.getLogger(__name__)
register()


class L2Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``adapter_params``; see `Options` for the meaning of the rest.

    Attributes:
        page_bytes: of the largest object.
        copies: besides, ``moved``: what is stored here goes to a peer alone; it is kept here where
            no peer takes it.
    """

    page_bytes: Annotated[int, Meta(ge=1, lt=1 << 40)]
    storage_bytes: Annotated[int, Meta(ge=1, lt=1 << 46)] = 1 << 30
    listen: str = ""
    peers: tuple[str, ...] = ()
    copies: Literal["local", "peers", "moved"] = "local"
    key_file: str | None = None


class KvxferL2(L2AdapterInterface):  # type: ignore[misc]
    """Objects in a pool of host memory, and in those of other servers."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        """Called by LMCache.

        Raises:
            InvalidUsage: wrong settings.
            NotAvailable: the port is taken.
        """
        super().__init__()
        try:
            given = msgspec.convert(params, L2Params)
        except msgspec.ValidationError as error:
            known = ", ".join(L2Params.__struct_fields__)
            raise InvalidUsage(
                f"adapter_params is not understood: {error}; known are {known}"
            ) from error
        self._chunks = ChunkStore(
            given.page_bytes,
            given.storage_bytes,
            listen=given.listen,
            peers=given.peers,
            copies="local" if given.copies == "moved" else given.copies,
            key_file=given.key_file,
            on_drop=self._dropped,
        )
        self._moves = given.copies == "moved"
        self._counts = dict.fromkeys(("moved_to_peers", "read_from_peers", "found_here"), 0)
        self._keys: dict[str, tuple[Any, int]] = {}
        self._results: dict[int, Any] = {}
        self._next_task = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._fds = {name: os.eventfd(0, os.EFD_NONBLOCK) for name in ("store", "lookup", "load")}
        self._worker = ThreadPoolExecutor(1, "kvxfer-lmcache-l2")

    def get_store_event_fd(self) -> int:
        """Readable once a store has ended."""
        return self._fds["store"]

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable once a lookup has ended."""
        return self._fds["lookup"]

    def get_load_event_fd(self) -> int:
        """Readable once a load has ended."""
        return self._fds["load"]

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Store objects in the background."""
        failed = L2StoreResult(False, 0)
        return self._submit("store", lambda: self._store(keys, objects), failed)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """The stores that have ended since the last call."""
        with self._lock:
            ended = {
                task: one for task, one in self._results.items() if isinstance(one, L2StoreResult)
            }
            for task in ended:
                del self._results[task]
        return ended

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Any) -> int:
        """Find objects, fetch those of peers, and keep them until they are unlocked."""
        return self._submit("lookup", lambda: self._lock_all(keys), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Which objects were found; None while they are looked for. Told once."""
        with self._lock:
            return self._results.pop(task_id, None)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Undo one lock of each."""
        for key in keys:
            self._chunks.unpin(_name(key))

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Fill objects in the background; the caller keeps them until that has ended."""
        pairs = dict(zip(map(_name, keys), objects, strict=True))
        return self._submit(
            "load",
            lambda: self._bitmap(keys, lambda name: self._load_one(name, pairs[name])),
            Bitmap(len(keys)),
        )

    def query_load_result(self, task_id: int) -> Any:
        """Which objects were filled; None while they are. Told once."""
        with self._lock:
            return self._results.pop(task_id, None)

    def report_status(self) -> dict[str, Any]:
        """For LMCache's ``/status``: objects moved to peers, which may have had them already, and
        objects of lookups by where they were."""
        return {"is_healthy": not self._is_closed, "type": type(self).__name__, **self._counts}

    def close(self) -> None:
        """End everything; may be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._chunks.close()
        for fd in self._fds.values():
            os.close(fd)

    def _submit(self, event: str, run: Callable[[], Any], failed: Any) -> int:
        with self._lock:
            self._next_task += 1
            task = self._next_task

        def work() -> None:
            try:
                result = run()
            except Exception:
                # LMCache's controllers wait for every task that they have submitted.
                _log.exception("a %s of the L2 store failed", event)
                result = failed
            with self._lock:
                self._results[task] = result
            os.eventfd_write(self._fds[event], 1)

        self._worker.submit(work)
        return task

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> L2StoreResult:
        num_bytes = 0
        for key, obj in zip(keys, objects, strict=True):
            name, size = _name(key), obj.get_size()
            form, data = Form(size, [], "", 0), bytes_of(obj, size)
            if self._moves and self._chunks.give(name, form, data):
                self._counts["moved_to_peers"] += 1
                num_bytes += size
                continue
            self._keys.setdefault(name, (key, size))
            if self._chunks.put(name, form, data):
                # At once, because a later chunk of this task may already take its page.
                self._notify_keys_stored([key], [size])
                num_bytes += size
            elif name not in self._chunks:
                self._keys.pop(name, None)
                return L2StoreResult(False, 0)
        return L2StoreResult(True, num_bytes)

    def _bitmap(self, keys: Sequence[Any], succeeds: Callable[[str], bool]) -> Any:
        names = [_name(key) for key in keys]
        found = [index for index, name in enumerate(names) if succeeds(name)]
        bitmap = Bitmap(len(keys))
        bitmap.batched_set(found)
        self._notify_keys_accessed([keys[index] for index in found])
        return bitmap

    def _lock_all(self, keys: Sequence[Any]) -> Any:
        here, came = self._chunks.pin_all(list(map(_name, keys)))
        self._counts["found_here"] += len(here)
        self._counts["read_from_peers"] += len(came)
        return self._bitmap(keys, (here | came).__contains__)

    def _load_one(self, name: str, obj: Any) -> bool:
        with self._chunks.reading(name) as found:
            if found is None or found[0].num_bytes != obj.get_size():
                return False
            bytes_of(obj, found[0].num_bytes)[:] = found[1]
            return True

    def _dropped(self, name: str) -> None:
        known = self._keys.pop(name, None)
        if known is not None:
            self._notify_keys_deleted([known[0]], [known[1]])


def _name(key: Any) -> str:
    fields = (key.model_name, key.kv_rank, key.chunk_hash.hex(), key.object_group_id)
    return "@".join(map(str, (*fields, key.cache_salt)))
