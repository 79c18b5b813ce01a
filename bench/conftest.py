"""What the suites share: paths between two sides, and block tables in an engine's disorder."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

import kvxfer

# Twice the request, as in a sweep: an engine's blocks are never all of one request.
POOL_FACTOR = 2
_SEED = 0


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
