"""LMCache's storage plug-in: chunks of KV in host memory, here and in other engines' stores.

``storage_plugins: ["kvxfer"]``, and in ``extra_config`` ``storage_plugin.kvxfer.module_path:
kvxfer.connectors.lmcache`` and ``storage_plugin.kvxfer.class_name: KvxferBackend``. Nothing is
rebound.
"""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lmcache.utils import STR_DTYPE_TO_TORCH_DTYPE, TORCH_DTYPE_TO_STR_DTYPE, CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from kvxfer.connectors.lmcache.chunk_store import Bytes, ChunkStore, page_bytes_of
from kvxfer.connectors.lmcache.options import read_options
from kvxfer.connectors.lmcache.page_store import Form
from kvxfer.errors import InvalidUsage

_log = logging.getLogger(__name__)


class KvxferBackend(StoragePluginInterface):  # type: ignore[misc]
    """One rank's chunks in a pool of pages, which other engines' ranks read and write."""

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
    ) -> None:
        """Called by LMCache.

        Raises:
            InvalidUsage: wrong settings, or no LocalCPU back end to make objects of.
            NotAvailable: a port is taken.
        """
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        if local_cpu_backend is None:
            raise InvalidUsage("the kvxfer storage plug-in needs local_cpu and max_local_cpu_size")
        options, rank = read_options(config.extra_config), metadata.worker_id
        self._chunks = ChunkStore(
            page_bytes_of(metadata.kv_shape, metadata.kv_dtype),
            options.storage_bytes,
            listen=options.storage_listen[rank] if options.storage_listen else "",
            peers=[peer[rank] for peer in options.storage_peers],
            copies=options.storage_copies,
            key_file=options.key_file,
            transport=options.transport,
            num_threads=options.num_threads,
            timeout_s=options.connect_timeout_s,
            move_timeout_s=options.write_timeout_s,
        )
        self._putting: set[CacheEngineKey] = set()
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "kvxfer-lmcache-store")

    def __str__(self) -> str:
        return "kvxfer"

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether a chunk is here or at a peer; one that is to be pinned is fetched."""
        name = key.to_string()
        if pin:
            return self._chunks.is_near(name) and self._chunks.pin(name)
        return self._chunks.is_anywhere(name)

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Whether a chunk is being stored."""
        return key in self._putting

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> list[Future[None]]:
        """Store chunks in the background; each object is held until it is stored."""
        futures = []
        for key, obj in zip(keys, objs, strict=True):
            with self._lock:
                if key in self._putting:
                    continue
                self._putting.add(key)
            obj.ref_count_up()
            futures.append(self._worker.submit(self._put, key, obj, on_complete_callback))
        return futures

    def get_blocking(self, key: CacheEngineKey) -> Any:
        """The chunk as an object that the caller owns; None where it is nowhere."""
        name = key.to_string()
        if not self._chunks.is_near(name):
            return None
        with self._chunks.reading(name) as found:
            if found is None:
                return None
            return self._object_of(*found)

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        """How many chunks from the first on are here or at a peer."""
        return int(self.batched_contains(keys, pin))

    def pin(self, key: CacheEngineKey) -> bool:
        """Keep a chunk that is here; False where it is not."""
        return self._chunks.pin(key.to_string())

    def unpin(self, key: CacheEngineKey) -> bool:
        """Undo one pin."""
        return self._chunks.unpin(key.to_string())

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Forget a chunk here, unless somebody reads it."""
        return self._chunks.drop(key.to_string())

    def get_allocator_backend(self) -> Any:
        """Where objects come from: the LocalCPU back end."""
        return self.local_cpu_backend

    def close(self) -> None:
        """End everything; may be called more than once."""
        self._worker.shutdown(wait=True, cancel_futures=False)
        self._chunks.close()

    def _object_of(self, form: Form, data: Bytes) -> Any:
        """None where there is no room for it, and where this LMCache has no such object: what a
        peer wrote may be of another release."""
        import torch

        try:
            dtype, fmt = STR_DTYPE_TO_TORCH_DTYPE[form.dtype], MemoryFormat(form.fmt)
        except (KeyError, ValueError) as error:
            _log.warning("a chunk is not read: %s is unknown to this LMCache", error)
            return None
        num_bytes = math.prod(form.shape) * int(dtype.itemsize)
        if num_bytes != form.num_bytes:
            _log.warning(
                "a chunk is not read: it has %d bytes, its shape %s and dtype %s have %d",
                form.num_bytes,
                form.shape,
                form.dtype,
                num_bytes,
            )
            return None
        obj = self.local_cpu_backend.allocate(torch.Size(form.shape), dtype, fmt)
        if obj is not None:
            bytes_of(obj, form.num_bytes)[:] = data
        return obj

    def _put(self, key: Any, obj: Any, on_complete: Callable[[Any], None] | None) -> None:
        try:
            form = _form_of(obj)
            self._chunks.put(key.to_string(), form, bytes_of(obj, form.num_bytes))
        finally:
            obj.ref_count_down()
            with self._lock:
                self._putting.discard(key)
        if on_complete is not None:
            on_complete(key)


def _form_of(obj: Any) -> Form:
    meta = obj.meta
    return Form(
        num_bytes=meta.get_size(),
        shape=list(meta.shape),
        dtype=TORCH_DTYPE_TO_STR_DTYPE[meta.dtype],
        fmt=meta.fmt.value,
    )


def bytes_of(obj: Any, num_bytes: int) -> Bytes:
    """The used bytes of one of LMCache's objects in host memory."""
    import torch

    found: Bytes = obj.raw_data.view(torch.uint8).flatten()[:num_bytes].numpy()
    return found
