"""A receiver's pages and hits, as `Arrivals` wants them: over what LMCache's PD back ends keep."""

import math
import time
from typing import Any

from lmcache.utils import STR_DTYPE_TO_TORCH_DTYPE, CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat

from kvxfer.connectors.lmcache.wire import AllocRequest
from kvxfer.errors import InvalidUsage


def key_of(text: str) -> CacheEngineKey:
    """The key that a peer names so.

    Raises:
        InvalidUsage: it is none that this LMCache knows.
    """
    try:
        return CacheEngineKey.from_string(text)
    except (ValueError, KeyError) as error:  # another dtype is a KeyError
        raise InvalidUsage(
            f"{text[:200]!r} is no key of this LMCache ({error}); run the same release on both "
            'sides, and a model whose name has no "@"'
        ) from error


class BackendShelf:
    """The dictionary ``data`` of a PD back end, and the allocator behind it.

    An object's reference count is the number of requests that will fetch it, as in LMCache; the
    engine counts down as it fetches (``remove``).
    """

    def __init__(self, backend: Any) -> None:
        """Of a back end whose allocator may come later."""
        self._backend = backend
        # time.monotonic() of each hit, that of longest ago first; under the back end's `data_lock`.
        self._touched: dict[Any, float] = {}

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, which holds one chunk."""
        return int(self._allocator.align_bytes)

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        allocator = self._allocator
        return int(allocator.buffer_size // allocator.align_bytes)

    def num_free(self) -> int:
        """Pages that nobody has."""
        return len(self._allocator.free_blocks)

    def take(self, request: AllocRequest, index: int) -> Any:
        """A page for key ``index``; None where none is free.

        Raises:
            InvalidUsage: what is asked for does not fit a page.
        """
        shape, dtype, fmt = self._layout(request, index)
        return self._backend.allocate(shape, dtype, fmt)

    def give_back(self, page: Any) -> None:
        """A page that was never published."""
        page.ref_count_down()

    def number(self, page: Any) -> int:
        """The number of a page."""
        return int(page.meta.address)

    def hold(self, key: str) -> bool:
        """Count one more request that fetches ``key``; False if it is no hit.

        Raises:
            InvalidUsage: it is no key. What passes here is one to the methods below.
        """
        found = key_of(key)
        self.touch(found)
        return bool(self._backend.contains(found, pin=True))

    def publish(self, key: str, page: Any) -> None:
        """Make ``key`` a hit, or count one more request where it is one."""
        found = key_of(key)
        with self._backend.data_lock:
            other = self._backend.data.setdefault(found, page)
            if other is not page:
                other.ref_count_up()
            self._touched.pop(found, None)
            self._touched[found] = time.monotonic()
        if other is not page:
            page.ref_count_down()

    def drop(self, key: str) -> None:
        """Count one request less that fetches ``key``."""
        self._count_down(key_of(key), all_of_it=False)

    def drop_unread(self, idle_s: float) -> bool:
        """Forget the key that was touched longest ago, if that is ``idle_s``; False if none."""
        with self._backend.data_lock:
            oldest, at_s = next(iter(self._touched.items()), (None, math.inf))
        if time.monotonic() - at_s < idle_s:
            return False
        self._count_down(oldest, all_of_it=True)
        return True

    def touch(self, key: Any) -> None:
        """Somebody looks ``key`` up: its lease begins anew."""
        with self._backend.data_lock:
            if self._touched.pop(key, None) is not None:
                self._touched[key] = time.monotonic()

    def forget(self, key: Any) -> None:
        """Somebody has fetched ``key``, perhaps the last one who will."""
        with self._backend.data_lock:
            if key not in self._backend.data:
                self._touched.pop(key, None)

    @property
    def _allocator(self) -> Any:
        both = self._backend.memory_allocator
        on_host = self._backend.corrected_device == "cpu"
        return both.cpu_allocator if on_host else both.gpu_allocator

    def _count_down(self, key: Any, *, all_of_it: bool) -> None:
        with self._backend.data_lock:
            page = self._backend.data.get(key)
            count = 0 if page is None else page.get_ref_count()
            times = count if all_of_it else min(count, 1)
            if times >= count:
                self._backend.data.pop(key, None)
                self._touched.pop(key, None)
        for _ in range(times):
            page.ref_count_down()

    def _layout(self, request: AllocRequest, index: int) -> tuple[Any, Any, Any]:
        import torch

        dtype = STR_DTYPE_TO_TORCH_DTYPE.get(request.dtype)
        try:
            fmt = MemoryFormat(request.fmt)
        except ValueError:
            fmt = MemoryFormat.UNDEFINED
        axis = fmt.token_dim()
        if dtype is None or fmt is MemoryFormat.UNDEFINED or axis >= len(request.shape):
            raise InvalidUsage(
                f"pages of dtype {request.dtype!r}, format {request.fmt} and shape {request.shape} "
                "are none of LMCache's"
            )
        shape = list(request.shape)
        if index == len(request.keys) - 1:
            shape[axis] = request.last_chunk_toks
        num_bytes = math.prod(shape) * dtype.itemsize
        if not 0 < num_bytes <= self._allocator.align_bytes:
            raise InvalidUsage(
                f"a chunk of shape {shape} and dtype {request.dtype} has {num_bytes} bytes; a page "
                f"has {self._allocator.align_bytes}"
            )
        return torch.Size(shape), dtype, fmt
