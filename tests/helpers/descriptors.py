"""A process that is short of descriptors."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def few_descriptors(num_left: int) -> Iterator[None]:
    """A block in which this process can open so many files more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    probes = [os.open("/dev/null", os.O_RDONLY) for _ in range(num_left + 1)]
    for fd in probes:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(probes), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
