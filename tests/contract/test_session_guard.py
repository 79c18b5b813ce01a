"""Who may reach a session: binds beyond loopback, keys, advertised hosts and ports of ranks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from free_ports import free_ports

from kvxfer import Endpoint, KVCache, KVLayout, Receiver, Sender, TPLayout
from kvxfer.control import Ports, SharedKey
from kvxfer.errors import ControlTimeout, InvalidUsage, NotAvailable
from kvxfer.session import SendLimits
from kvxfer.transport import Board
from kvxfer.transport.loopback import LoopbackTransport

LAYOUT = KVLayout(2, 4, head_dim=8, block_size=4)
GUARD_S = 20.0
BEYOND = "192.0.2.7"  # an address for documentation: on no machine
Open = Callable[..., Any]


def cache_of(value: int, rank: TPLayout | None = None) -> KVCache:
    rank = rank or TPLayout()
    array = np.full(8 * rank.rank_layout(LAYOUT).block_bytes, value, np.uint8)
    return KVCache(LAYOUT, array, rank=rank)


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open a side over a cache of one value, and close it at the end."""
    with ExitStack() as stack:

        def make(kind: Any, value: int = 0, rank: TPLayout | None = None, **args: Any) -> Any:
            cache = cache_of(value, rank)
            stack.callback(cache.close)
            return stack.enter_context(kind(cache, **{"transport": "loopback", **args}))

        yield make


@pytest.fixture
def keys(tmp_path: Path) -> tuple[SharedKey, SharedKey]:
    return SharedKey.create(tmp_path / "one"), SharedKey.create(tmp_path / "other")


class Listener(LoopbackTransport):
    """Says where it was told to listen."""

    def __init__(self) -> None:
        super().__init__(1)
        self.hosts: list[str] = []

    def serve(self, board: Board, bind_host: str) -> None:
        self.hosts.append(bind_host)


# Beyond loopback.


@pytest.mark.parametrize("kind", [Endpoint, Receiver, Sender])
@pytest.mark.parametrize("host", [BEYOND, "0.0.0.0"])
def test_a_bind_beyond_loopback_wants_a_key(opened: Open, kind: Any, host: str) -> None:
    args = {} if kind is Sender or host == BEYOND else {"advertise_host": BEYOND}
    with pytest.raises(InvalidUsage, match=f"{host} (lets other hosts in|is a wildcard)"):
        opened(kind, bind_host=host, **args)


def test_the_transport_listens_nowhere_before_that(opened: Open) -> None:
    listener = Listener()
    with pytest.raises(InvalidUsage, match="there is no key"):
        opened(Endpoint, transport=listener, bind_host=BEYOND)
    assert listener.hosts == []
    opened(Endpoint, transport=listener)
    assert listener.hosts == ["127.0.0.1"]


@pytest.mark.parametrize("guard", ["key", "insecure"])
def test_with_one_the_bind_is_tried(
    opened: Open, keys: tuple[SharedKey, SharedKey], guard: str
) -> None:
    args = {"key": keys[0]} if guard == "key" else {"insecure": True}
    for kind in (Endpoint, Receiver):
        with pytest.raises(NotAvailable, match=BEYOND):
            opened(kind, bind_host=BEYOND, **args)
    opened(Sender, bind_host=BEYOND, **args)  # this transport opens no port there


def test_behind_a_wildcard_the_advertised_host_is_dialled(opened: Open) -> None:
    listener = Listener()
    made = opened(
        Endpoint,
        transport=listener,
        bind_host="0.0.0.0",
        advertise_host=BEYOND,
        insecure=True,
    )
    assert listener.hosts == [BEYOND]
    assert {url.rpartition(":")[0] for url in made.addresses.values()} == {f"tcp://{BEYOND}"}


def test_a_name_is_looked_up_for_the_transport(opened: Open) -> None:
    listener = Listener()
    opened(Endpoint, transport=listener, bind_host="localhost")
    assert listener.hosts[0] in ("127.0.0.1", "::1")


# Keys.


def test_holders_of_a_key_exchange_requests(
    opened: Open, keys: tuple[SharedKey, SharedKey]
) -> None:
    key, _ = keys
    receiver, sender = opened(Receiver, key=key), opened(Sender, 7, key=key)
    handle = sender.send("r", [1, 2], to=receiver.addresses)
    handle.wait(GUARD_S)
    assert handle.num_bytes == 2 * LAYOUT.block_bytes
    assert handle.actual_path
    assert receiver.poll(GUARD_S).ok


@pytest.mark.parametrize("index", [None, 1])
def test_others_are_not_met(
    opened: Open, keys: tuple[SharedKey, SharedKey], index: int | None
) -> None:
    receiver = opened(Receiver, key=keys[0])
    key = None if index is None else keys[index]
    sender = opened(Sender, key=key, limits=SendLimits(connect_s=0.5))
    with pytest.raises(ControlTimeout):
        sender.send("r", [1], to=receiver.addresses).wait(GUARD_S)
    assert receiver.num_open == 0


def test_a_peer_has_the_key_of_its_endpoint(
    opened: Open, keys: tuple[SharedKey, SharedKey]
) -> None:
    key, other = keys
    far, near = opened(Endpoint, key=key), opened(Endpoint, 5, key=key)
    with near.connect(far.addresses, deadline_s=GUARD_S) as peer:
        blocks = peer.reserve("r", 2)
        peer.put([0, 1], blocks).wait(GUARD_S)
        peer.commit("r")
        assert far.wait(peer.connection, 1, timeout_s=GUARD_S)
    stranger = opened(Endpoint, key=other)
    with pytest.raises(ControlTimeout, match="no connection"):
        stranger.connect(far.addresses, deadline_s=0.5)


# Ports.


def test_every_rank_takes_its_own_ports() -> None:
    first = 21_000
    ports = Ports.derived(first, num_ranks=4)
    ranks = [TPLayout(2, tp, pp_size=2, pp_rank=pp) for pp in range(2) for tp in range(2)]
    for index, rank in enumerate(ranks):
        assert ports.of_rank(rank) == {
            "init": first + 2 * index,
            "alloc": first + 2 * index + 1,
        }


def test_ports_of_another_number_of_ranks_are_refused(opened: Open) -> None:
    with pytest.raises(InvalidUsage, match=r"ports of 2 ranks.*tp 4 x pp 1, which has 4"):
        opened(Endpoint, rank=TPLayout(4, 1), ports=Ports.derived(21_000, num_ranks=2))


def test_an_endpoint_of_ranks_is_found_at_its_ports(opened: Open) -> None:
    free = free_ports(2)
    ports = Ports.listed([1, free[0]], [2, free[1]], num_ranks=2)
    made = opened(Receiver, rank=TPLayout(2, 1), ports=ports)
    assert made.addresses == {
        "init": f"tcp://127.0.0.1:{free[0]}",
        "alloc": f"tcp://127.0.0.1:{free[1]}",
    }


def test_aliases_of_a_channel_are_told(opened: Open) -> None:
    made = opened(Endpoint, ports={"alloc": (0, 0)})
    assert len(set(made.aliases["alloc"])) == 2
    far = opened(Endpoint)
    for alloc in made.aliases["alloc"]:
        with far.connect({"init": made.addresses["init"], "alloc": alloc}) as peer:
            assert peer.reserve(alloc, 1).size == 1
