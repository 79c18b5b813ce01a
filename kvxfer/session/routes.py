"""The routes between the caches of one connection, kept: most of what planning a request costs."""

import threading
from collections.abc import Collection

from kvxfer.layout import KVView, Route, ToFp8
from kvxfer.transport import Op

# A transfer layer by layer uses as many as the model has layers, in one direction.
_MAX_KEPT = 256


class Routes:
    """Routes by direction and layers. Thread-safe."""

    def __init__(self, near: KVView, far: KVView, convert: ToFp8 | None) -> None:
        """Between ``near``, which a put reads, and ``far``, which it writes."""
        self._near, self._far = near, far
        self._convert = convert
        self._kept: dict[tuple[Op, frozenset[int] | None], Route] = {}  # oldest first
        self._lock = threading.Lock()

    def of(self, op: Op, layers: Collection[int] | None = None) -> Route:
        """What ``op`` copies of these layers; None = all.

        Raises:
            LayoutMismatch: the dtypes forbid this direction.
            InvalidUsage: scales of another shape than the model.
        """
        key = (op, None if layers is None else frozenset(layers))
        with self._lock:
            route = self._kept.get(key)
            if route is None:
                src, dst = (self._near, self._far) if op is Op.PUT else (self._far, self._near)
                route = Route(src, dst, layers=key[1], convert=self._convert)
                if len(self._kept) >= _MAX_KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = route
            return route
