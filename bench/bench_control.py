"""Round trips on the alloc channel between two processes: what a request pays before its bytes."""

import itertools
from typing import Any

import pytest

from kvxfer import KVLayout

LAYOUT = KVLayout(1, 1, head_dim=16, dtype="uint8", block_size=1)
POOL_BLOCKS = 1 << 16
ROUNDS = 200


@pytest.fixture
def peer(kvxfer_pair: Any) -> Any:
    """A peer in another process, with many blocks of few bytes."""
    return kvxfer_pair(layout=LAYOUT, num_blocks=POOL_BLOCKS).peer


class Requests:
    """One request after the other; what the last one holds is given back untimed."""

    def __init__(self, peer: Any, num_blocks: int) -> None:
        self._peer = peer
        self._num_blocks = num_blocks
        self._names = (f"request-{number}" for number in itertools.count())
        self._name: str | None = None

    def next(self) -> tuple[tuple[str], dict[str, Any]]:
        """Give the last request's blocks back and name the next; arguments of a round."""
        if self._name is not None:
            self._peer.abort(self._name)
        self._name = next(self._names)
        return (self._name,), {}

    def reserve(self, name: str) -> Any:
        """One round trip."""
        return self._peer.reserve(name, self._num_blocks)

    def reserve_and_abort(self, name: str) -> Any:
        """Two round trips, as long as with a commit, whose blocks only the far engine frees."""
        ids = self._peer.reserve(name, self._num_blocks)
        self._peer.abort(name)
        return ids


@pytest.mark.benchmark(group="alloc channel")
@pytest.mark.parametrize("num_blocks", [1, 512, 8192])
@pytest.mark.parametrize("verbs", ["reserve", "reserve_and_abort"])
def test_round_trip(benchmark: Any, peer: Any, verbs: str, num_blocks: int) -> None:
    requests = Requests(peer, num_blocks)
    ids = benchmark.pedantic(
        getattr(requests, verbs),
        setup=requests.next,
        rounds=ROUNDS,
        iterations=1,
        warmup_rounds=5,
    )
    assert len(set(ids.tolist())) == num_blocks
    assert 0 <= ids.min() <= ids.max() < POOL_BLOCKS
    benchmark.extra_info.update(num_blocks=num_blocks, verified=True)
