"""What a process holds, and a check that a cycle of work gives it all back."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from waiting import GUARD_S

_SEGMENT_NAME = "/memfd:kvxfer"  # how the core names its segments


def num_fds() -> int:
    """Open descriptors of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a Path list would hold one more


def num_segment_mappings() -> int:
    """Mappings of shared segments in this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count(_SEGMENT_NAME)


def resources() -> dict[str, int]:
    """Everything that a leak would show in."""
    return {
        "fds": num_fds(),
        "segment_mappings": num_segment_mappings(),
        "threads": threading.active_count(),
    }


def check_flat(
    measure: Callable[[], dict[str, int]],
    cycle: Callable[[], object],
    *,
    num_cycles: int,
    settle_s: float = GUARD_S,
) -> None:
    """Fail where a measure has grown after many cycles; the last of them may need to settle."""
    for _ in range(3):
        cycle()
    before = _settled(measure, None, 0.2)
    for _ in range(num_cycles):
        cycle()
    after = _settled(measure, before, settle_s)
    grown = {name: (before[name], after[name]) for name in before if after[name] > before[name]}
    assert not grown, f"leak over {num_cycles} cycles, before and after: {grown}"


def _settled(
    measure: Callable[[], dict[str, int]], target: dict[str, int] | None, settle_s: float
) -> dict[str, int]:
    end_s = time.monotonic() + settle_s
    found = measure()
    while time.monotonic() < end_s:
        if target is not None and all(found[name] <= target[name] for name in target):
            break
        time.sleep(0.02)
        found = measure()
    return found


def private_bytes() -> int:
    """Resident memory that is this process's own: what a hidden copy of the data would add to."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("this kernel does not report RssAnon")


class Growth:
    """How far `private_bytes` has risen above where it began, at its peak of so many samples."""

    def __init__(self) -> None:
        gc.collect()
        self._before = private_bytes()
        self.peak_bytes = 0
        self.num_samples = 0

    def sample(self) -> None:
        self.num_samples += 1
        self.peak_bytes = max(self.peak_bytes, private_bytes() - self._before)


@contextmanager
def private_growth() -> Iterator[Growth]:
    """Watches the memory of this process, from another thread, while the block runs."""
    growth = Growth()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.0005):
            growth.sample()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield growth
        growth.sample()
    finally:
        stop.set()
        thread.join()
