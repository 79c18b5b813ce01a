"""Round trips on the alloc channel between processes: what a request pays before its bytes."""

import itertools
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer import KVLayout

LAYOUT = KVLayout(1, 1, head_dim=16, dtype="uint8", block_size=1)
POOL_BLOCKS = 1 << 16
ROUNDS = 200
LOAD = Path(__file__).with_name("control_load.py")
LOAD_REQUESTS = 5_000  # of each client, two calls each


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


class LoadProcess:
    """A process of control_load.py."""

    def __init__(self, *args: object) -> None:
        self._child = subprocess.Popen(
            [sys.executable, str(LOAD), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> "LoadProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.communicate()

    def line(self) -> str:
        """The next line that it writes."""
        assert self._child.stdout is not None
        return self._child.stdout.readline().decode().strip()

    def go(self) -> None:
        """Let it begin."""
        assert self._child.stdin is not None
        self._child.stdin.write(b"go\n")
        self._child.stdin.flush()

    def end(self) -> bytes:
        """What it writes from now to its end."""
        output, _ = self._child.communicate(timeout=100)
        assert self._child.returncode == 0
        return output


def load(num_clients: int, num_blocks: int) -> tuple[NDArray[np.float64], float]:
    """Seconds of every call of all clients at once, and seconds for all of them."""
    with ExitStack() as held:
        server = held.enter_context(LoadProcess("serve"))
        address = server.line()
        clients = [
            held.enter_context(LoadProcess("call", address, name, LOAD_REQUESTS, num_blocks))
            for name in range(num_clients)
        ]
        assert [client.line() for client in clients] == ["ready"] * num_clients
        begin_s = time.perf_counter()
        for client in clients:
            client.go()
        taken_s = [np.frombuffer(client.end(), np.float64) for client in clients]
        total_s = time.perf_counter() - begin_s
        num_free, num_calls = map(int, server.end().split())
    calls_s = np.concatenate(taken_s)
    assert num_free == POOL_BLOCKS  # every grant was committed and came back
    assert num_calls >= calls_s.size == 2 * LOAD_REQUESTS * num_clients
    return calls_s, total_s


@pytest.mark.benchmark(group="alloc channel under load")
@pytest.mark.parametrize("num_blocks", [1, 512])
@pytest.mark.parametrize("num_clients", [1, 2, 4, 8])
def test_load(benchmark: Any, num_clients: int, num_blocks: int) -> None:
    """Reserve and commit, each client as fast as it is answered; see the extra info."""
    calls_s, total_s = benchmark.pedantic(load, args=(num_clients, num_blocks), rounds=1)
    p50_s, p99_s = np.percentile(calls_s, [50, 99])
    benchmark.extra_info.update(
        num_clients=num_clients,
        num_blocks=num_blocks,
        round_trip_p50_us=round(p50_s * 1e6, 1),
        round_trip_p99_us=round(p99_s * 1e6, 1),
        requests_per_s=round(calls_s.size / total_s),
        verified=True,
    )
