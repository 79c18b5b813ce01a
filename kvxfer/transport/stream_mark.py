"""What the source of a copy waits for: a point in the work of a CUDA stream."""

from typing import TypeAlias

from kvxfer._core import StreamMark
from kvxfer.errors import InvalidUsage

__all__ = ["After", "StreamMark", "mark"]

After: TypeAlias = int | StreamMark | None
"""A stream's handle (0 = the default stream) stands for the mark of what is queued on it now."""


def mark(device: int, after: After) -> StreamMark | None:
    """What ``after`` stands for, marked now: streams go on, marks stay where they are.

    Args:
        device: CUDA device index of the memory that is read, and of the stream; -1 for host memory.
        after: a stream, a mark, or None for no order.

    Raises:
        InvalidUsage: an order on host memory.
        CudaError: no such stream.
    """
    if after is None:
        return None
    if device < 0:
        raise InvalidUsage(
            f"after={after!r} with host memory; synchronise the stream first, or use the nvlink "
            "transport for device memory"
        )
    return after if isinstance(after, StreamMark) else StreamMark(device, after)
