"""What a transfer took, in the words of NIXL."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Telemetry:
    """NIXL's `nixlXferTelemetry`, whose names these are.

    Attributes:
        startTime: when it was posted, microseconds of the monotonic clock.
        postDuration: how long posting took, microseconds.
        xferDuration: from then until it was complete and its notification sent, microseconds.
        totalBytes: what was copied.
        descCount: descriptors of each side.
    """

    startTime: int
    postDuration: int
    xferDuration: int
    totalBytes: int
    descCount: int
