"""NIXL's lists of descriptors as tables of numbers."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROW_BYTES = 24  # address, length and device of a descriptor, 8 bytes each


def rows_of(descs: Any) -> NDArray[np.uint64]:
    """The descriptors of a `nixlXferDList`, uint64 ``[n, 3]``: address, bytes, device.

    NIXL gives them out one at a time, a microsecond each. What its pickling writes ends with the
    same numbers in one piece; that is taken where it agrees with the first, the middle and the last
    descriptor, since it is no format that NIXL promises.
    """
    count = int(descs.descCount())
    state = descs.__getstate__()
    if count and isinstance(state, bytes):
        for padding in (0, 1):
            end = len(state) - padding
            data = state[max(end - count * _ROW_BYTES, 0) : end]
            if len(data) == count * _ROW_BYTES:
                rows = np.frombuffer(data, np.uint64).reshape(count, 3)
                probes = (0, count // 2, count - 1)
                if all(tuple(rows[at].tolist()) == tuple(descs[at]) for at in probes):
                    return rows
    return np.array([descs[at] for at in range(count)], np.uint64).reshape(count, 3)
