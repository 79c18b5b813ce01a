"""LMCache's storage plug-in, L2 plug-in and MP transfer channel on kvxfer, between processes."""

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("LMCache is not installed", allow_module_level=True)

from free_ports import free_ports
from lmcache_pairs import HOST, MP_PROGRAM, HostProcess

from kvxfer.connectors.lmcache.chunk_store import ChunkStore
from kvxfer.connectors.lmcache.page_store import Form
from kvxfer.control import SharedKey

TOKENS, TOKEN_BYTES = 1000, 8192
pytestmark = pytest.mark.timeout(600)


def addresses(count: int) -> list[str]:
    return [f"{HOST}:{port}" for port in free_ports(count)]


def plugin(**own: Any) -> dict[str, Any]:
    """The configuration of an engine with the plug-in, by LMCache's own keys."""
    return {
        "chunk_size": 256,
        "local_cpu": True,
        "max_local_cpu_size": 0.25,
        "save_unfull_chunk": True,
        "storage_plugins": ["kvxfer"],
        "extra_config": {
            "storage_plugin.kvxfer.module_path": "kvxfer.connectors.lmcache",
            "storage_plugin.kvxfer.class_name": "KvxferBackend",
            "kvxfer.storage_bytes": 64 << 20,
        }
        | {f"kvxfer.{name}": value for name, value in own.items()},
    }


@pytest.fixture
def engines() -> Iterator[tuple[HostProcess, HostProcess]]:
    made = HostProcess(), HostProcess()
    yield made
    for one in made:
        one.close()


def test_chunks_are_read_from_another_engine(engines: tuple[HostProcess, HostProcess]) -> None:
    far, near = engines
    (at,) = addresses(1)
    far.call("open", config=plugin(storage_listen=[at]))
    near.call("open", config=plugin(storage_peers=[[at]]))
    assert far.call("store", first=0, count=TOKENS, spec=None, seed=5) == "ok"
    far.call("settle")
    assert far.call("references") == [1]
    assert near.call("lookup", first=0, count=TOKENS) == TOKENS
    for _ in range(2):  # from the peer, and then from LocalCPU or this pool
        found = near.call("retrieve", first=0, count=TOKENS, seed=5)
        assert found == {"tokens": TOKENS, "wrong": 0, "bytes": TOKENS * TOKEN_BYTES}
    assert near.call("references") == [1]
    assert near.call("lookup", first=5000, count=TOKENS) == 0
    for one in engines:
        assert one.call("shut") >= 0


def test_chunks_are_written_to_another_engine(engines: tuple[HostProcess, HostProcess]) -> None:
    far, near = engines
    (at,) = addresses(1)
    far.call("open", config=plugin(storage_listen=[at]))
    near.call("open", config=plugin(storage_peers=[[at]], storage_copies="peers"))
    assert near.call("store", first=0, count=TOKENS, spec=None, seed=9) == "ok"
    near.call("settle")
    assert near.call("references") == [1]
    near.kill()
    near.reap()
    found = far.call("retrieve", first=0, count=TOKENS, seed=9)
    assert found == {"tokens": TOKENS, "wrong": 0, "bytes": TOKENS * TOKEN_BYTES}
    assert far.call("references") == [1]


@pytest.mark.parametrize(
    ("dtype", "shape", "fmt"),
    [
        ("nosuchdtype", [4, 2, 256, 512], 1),
        ("bfloat16", [4, 2, 256, 512], 99),
        ("bfloat16", [4, 2, 256, 511], 1),
    ],
)
def test_a_chunk_that_this_lmcache_cannot_read_is_no_error(
    engines: tuple[HostProcess, HostProcess], dtype: str, shape: list[int], fmt: int
) -> None:
    # As a peer of another release writes it.
    near, _ = engines
    (at,) = addresses(1)
    size = 256 * TOKEN_BYTES
    with ChunkStore(size, size, listen=at) as far:
        near.call("open", config=plugin(storage_peers=[[at]]))
        (name,) = near.call("keys", first=0, count=256)
        assert far.put(name, Form(size, shape, dtype, fmt), np.zeros(size, np.uint8))
        assert near.call("lookup", first=0, count=256) == 256
        assert near.call("retrieve", first=0, count=256)["tokens"] == 0


def test_the_plugin_copies_as_it_is_told(engines: tuple[HostProcess, HostProcess]) -> None:
    host, _ = engines
    told = {"transport": "shm", "num_threads": 3, "write_timeout_s": 7.0, "key_file": "/key"}
    given = host.call(
        "plugin_settings", extra={f"kvxfer.{name}": one for name, one in told.items()}
    )
    told["move_timeout_s"] = told.pop("write_timeout_s")
    assert given | told == given


@pytest.fixture
def servers() -> Iterator[tuple[HostProcess, HostProcess]]:
    made = HostProcess(program=MP_PROGRAM), HostProcess(program=MP_PROGRAM)
    yield made
    for one in made:
        one.close()


def test_the_mp_channel_reads_pieces_of_any_size(servers: tuple[HostProcess, HostProcess]) -> None:
    far, near = servers
    at, own = addresses(2)
    far.call("open", num_bytes=(64 << 20) + 100, url=at, seed=3)  # its end lies within a page
    near.call("open", num_bytes=16 << 20, url=own, seed=4)
    near_pieces = [[0, 4096], [8192, 2 << 20], [6 << 20, 100], [7 << 20, 100]]
    far_pieces = [[40 << 20, 4096], [12288, 2 << 20], [64, 100], [(64 << 20) - 100, 100]]
    assert near.call("read", url=at, near=near_pieces, far=far_pieces) == [True] * 4
    for here, there in zip(near_pieces, far_pieces, strict=True):
        assert near.call("wrong_bytes", near=here, far=there, seed=3) == 0
    assert near.call("wrong_bytes", near=[4096, 4096], far=[4096, 4096], seed=4) == 0
    outside = [[(64 << 20) - 4096, 8192]]  # the peer's memory ends in it
    assert near.call("read", url=at, near=[[0, 8192]], far=outside) == [False]


def test_the_mp_channel_meets_a_server_that_was_started_anew(
    servers: tuple[HostProcess, HostProcess],
) -> None:
    far, near = servers
    at, own = addresses(2)
    far.call("open", num_bytes=1 << 20, url=at, seed=3)
    near.call("open", num_bytes=1 << 20, url=own, seed=4)
    assert near.call("read", url=at, near=[[0, 4096]], far=[[0, 4096]]) == [True]
    far.kill()
    far.reap()
    began = time.monotonic()
    assert near.call("read", url=at, near=[[0, 4096]], far=[[0, 4096]]) == [False]
    assert time.monotonic() - began < 20
    with HostProcess(program=MP_PROGRAM) as again:
        again.call("open", num_bytes=1 << 20, url=at, seed=6)
        assert near.call("read", url=at, near=[[0, 4096]], far=[[0, 4096]]) == [True]
        assert near.call("wrong_bytes", near=[0, 4096], far=[0, 4096], seed=6) == 0


def test_the_l2_plugin_stores_and_loads_here_and_there(
    servers: tuple[HostProcess, HostProcess],
) -> None:
    far, near = servers
    (at,) = addresses(1)
    size = 1 << 20
    far.call("open_l2", page_bytes=size, storage_bytes=8 * size, listen=at)
    near.call("open_l2", page_bytes=size, storage_bytes=8 * size, peers=[at])
    assert far.call("store", names=[1, 2, 3], size=size)
    assert near.call("store", names=[4], size=size)
    assert near.call("load", names=[1, 9, 3, 4], size=size) == ["right", "absent", "right", "right"]
    assert far.call("load", names=[4], size=size) == ["absent"]
    # A full store makes room by itself, and says so to LMCache's accounting.
    assert far.call("store", names=list(range(10, 20)), size=size)
    assert far.call("used_bytes") == 8 * size
    assert far.call("load", names=[19, 1], size=size) == ["right", "absent"]


@pytest.mark.parametrize(("is_shared", "found"), [(True, "right"), (False, "absent")])
def test_l2_plugins_with_one_key_keep_others_out(
    servers: tuple[HostProcess, HostProcess], tmp_path: Path, is_shared: bool, found: str
) -> None:
    far, near = servers
    (at,) = addresses(1)
    key_file, size = str(tmp_path / "key"), 1 << 20
    SharedKey.create(key_file)
    pool = {"page_bytes": size, "storage_bytes": 8 * size}
    far.call("open_l2", **pool, listen=at, key_file=key_file)
    near.call("open_l2", **pool, peers=[at], key_file=key_file if is_shared else None)
    assert far.call("store", names=[1], size=size)
    assert near.call("load", names=[1], size=size) == [found]
