"""kvxfer in running ``lmcache server`` processes: its L2 plug-in, and its channel between peers."""

import importlib.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("LMCache is not installed", allow_module_level=True)

from free_ports import free_port
from lmcache_pairs import CLIENT_PROGRAM, HOST, HostProcess
from lmcache_servers import Coordinator, Server

from kvxfer.errors import NotAvailable
from kvxfer.memory import shared_empty

CHUNKS, CHUNK_BYTES = 4, 512 << 10
pytestmark = pytest.mark.timeout(600)
MakeServer = Callable[..., Server]


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator()
    yield made
    made.close()


@pytest.fixture
def new_server() -> Iterator[MakeServer]:
    made: list[Server] = []

    def make(*args: Any, **kwargs: Any) -> Server:
        made.append(Server(*args, **kwargs))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def client() -> Iterator[HostProcess]:
    made = HostProcess(program=CLIENT_PROGRAM)
    yield made
    made.kill()  # its clients would wait for servers that are gone
    made.close()


def open_all(client: HostProcess, *servers: Server) -> None:
    for server in servers:
        server.await_ready()
    for server in servers:
        client.call("open", url=server.url)


def test_a_server_finds_in_l2_what_another_stored(
    new_server: MakeServer, client: HostProcess
) -> None:
    at = f"{HOST}:{free_port()}"
    pool = {"page_bytes": CHUNK_BYTES, "storage_bytes": 16 * CHUNK_BYTES}
    far, near = new_server(**pool, listen=at), new_server(**pool, peers=[at])
    open_all(client, far, near)
    assert client.call("store", url=far.url, number=1)
    assert client.call("hits", url=near.url, number=1, wanted=CHUNKS) == CHUNKS
    assert client.call("retrieve", url=near.url, number=1) == "right"
    assert client.call("hits", url=near.url, number=2, wanted=0) == 0
    far.kill()
    assert client.call("retrieve", url=near.url, number=1) == "right"
    assert (
        client.call("hits", url=near.url, number=3, wanted=0) == 0
    )  # an error of its peer's alone


def test_a_server_moves_what_it_is_given_to_another(
    new_server: MakeServer, client: HostProcess
) -> None:
    at = f"{HOST}:{free_port()}"
    pool = {"page_bytes": CHUNK_BYTES, "storage_bytes": 16 * CHUNK_BYTES}
    far = new_server(**pool, listen=at)
    near = new_server(**pool, peers=[at], copies="moved", policy="skip_l1")
    open_all(client, far, near)
    assert client.call("store", url=near.url, number=1)
    assert client.call("hits", url=near.url, number=1, wanted=CHUNKS) == CHUNKS
    assert client.call("retrieve", url=near.url, number=1) == "right"
    counts = near.counts()
    assert (counts["moved_to_peers"], counts["read_from_peers"]) == (CHUNKS, CHUNKS)
    assert client.call("hits", url=far.url, number=1, wanted=CHUNKS) == CHUNKS


def test_a_server_reads_from_the_memory_of_its_peer(
    coordinator: Coordinator, new_server: MakeServer, client: HostProcess
) -> None:
    # An L2 store that nobody else reaches: its import is what offers the channel.
    pool = {"page_bytes": CHUNK_BYTES, "storage_bytes": CHUNK_BYTES}
    coordinator.await_ready()
    first, second = new_server(coordinator, **pool), new_server(coordinator, **pool)
    open_all(client, first, second)
    assert client.call("store", url=first.url, number=1)
    assert client.call("hits", url=second.url, number=1, wanted=CHUNKS) == CHUNKS
    assert client.call("retrieve", url=second.url, number=1) == "right"
    assert client.call("store", url=second.url, number=2)  # and the other way
    assert client.call("hits", url=first.url, number=2, wanted=CHUNKS) == CHUNKS
    assert client.call("retrieve", url=first.url, number=2) == "right"


@pytest.mark.filterwarnings("ignore")  # of what LMCache imports
def test_a_channel_that_cannot_be_made_leaves_its_memory_free_for_others() -> None:
    from kvxfer.connectors.lmcache.mp_channel import KvxferContext

    memory = shared_empty((8, 4096))

    def context(num_pages: int, at: str) -> Any:
        size = num_pages * 4096
        return KvxferContext(
            SimpleNamespace(ptr=memory.ctypes.data, size=size, align_bytes=4096), at, at
        )

    with pytest.raises(NotAvailable):
        context(8, "192.0.2.7:7000")  # of no machine
    context(4, f"{HOST}:{free_port()}").close()
