"""What the suites share: paths between two sides, block tables in an engine's disorder, and the
rate of one contiguous copy."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

import kvxfer

# Twice the request, as in a sweep: an engine's blocks are never all of one request.
POOL_FACTOR = 2
_SEED = 0
_COPIES = 5

CopyRate: TypeAlias = Callable[[str, str, int], float]
"""GB/s of one copy of so many bytes between two of torch's devices, as ``cuda:0`` or ``cpu``."""


@dataclass(frozen=True)
class Path:
    """A transport and the peer's memory."""

    transport: str
    memory: str

    def __str__(self) -> str:
        return f"{self.transport}-{self.memory}"


PATHS = (
    Path("shm", "shared"),
    Path("shm", "private"),
    Path("loopback", "shared"),
    Path("nvlink", "device"),
)


@dataclass(frozen=True)
class Tables:
    """A request's blocks on either side and the size of the pools, in a random order."""

    num_blocks: int
    source: NDArray[np.int64]
    destination: NDArray[np.int64]


@pytest.fixture(params=PATHS, ids=str)
def path(request: pytest.FixtureRequest) -> Path:
    """Every path there is; skips those that do not work here, and says why."""
    chosen: Path = request.param
    found = kvxfer.available_transports()[chosen.transport]
    if not found.available:
        pytest.skip(f"{chosen.transport}: {found.reason}")
    return chosen


@pytest.fixture
def draw_tables() -> Callable[[int], Tables]:
    """Draw the tables of a request of so many blocks."""

    def draw(num_blocks: int) -> Tables:
        rng = np.random.default_rng(_SEED)
        pool = POOL_FACTOR * num_blocks
        return Tables(pool, rng.permutation(pool)[:num_blocks], rng.permutation(pool)[:num_blocks])

    return draw


@pytest.fixture
def one_copy_gb_per_s() -> CopyRate:
    """The limit of a path between GPUs or within one: the median of some contiguous copies."""

    def measure(source: str, destination: str, num_bytes: int) -> float:
        import torch

        def wait() -> None:
            for device in (source, destination):
                if device != "cpu":
                    torch.cuda.synchronize(device)

        near = torch.zeros(num_bytes, dtype=torch.uint8, device=source)
        far = torch.empty(num_bytes, dtype=torch.uint8, device=destination)
        rates = []
        for _ in range(_COPIES + 1):  # the first one makes the GPUs peers
            wait()
            began = time.perf_counter()
            far.copy_(near)
            wait()
            rates.append(num_bytes / (time.perf_counter() - began) / 1e9)
        return statistics.median(rates[1:])

    return measure
