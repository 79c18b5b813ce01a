"""The channel as LMCache's P2P back end uses it: both ways over one handshake."""

import importlib.util
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("LMCache is not installed", allow_module_level=True)

from free_ports import free_ports
from lmcache_pairs import HOST, PROGRAM, HostProcess
from peer_process import RemoteError

P2P_PROGRAM = PROGRAM.with_name("lmcache_p2p_host.py")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def sides() -> Iterator[tuple[HostProcess, HostProcess]]:
    made = HostProcess(program=P2P_PROGRAM), HostProcess(program=P2P_PROGRAM)
    yield made
    for one in made:
        one.close()


def test_who_was_met_writes_back_under_the_name_it_was_told(
    sides: tuple[HostProcess, HostProcess],
) -> None:
    near, far = sides
    own, at = (f"{HOST}:{port}" for port in free_ports(2))
    near.call("open", url=own, seed=10)
    far.call("open", url=at, seed=50)
    assert not far.call("knows", url=own)
    assert near.call("meet", url=at) == f"lookup of {at}"
    assert far.call("knows", url=own)
    assert far.call("write", url=own, near=[0, 1], far=[7, 2]) == 2
    assert near.call("content") == [10, 11, 51, 13, 14, 15, 16, 50]
    assert near.call("read", url=at, near=[0], far=[3]) == 1
    assert near.call("content")[0] == 53
    assert near.call("write", url=at, near=[], far=[]) == 0
    with pytest.raises(RemoteError, match="page 8 of the peer's pool, which has 8"):
        near.call("write", url=at, near=[0], far=[8])
    with pytest.raises(RemoteError, match="was never met"):
        near.call("write", url="127.0.0.1:1", near=[0], far=[0])


def test_a_peer_that_was_started_anew_is_met_and_written_again(
    sides: tuple[HostProcess, HostProcess],
) -> None:
    near, far = sides
    own, at = (f"{HOST}:{port}" for port in free_ports(2))
    near.call("open", url=own, seed=10)
    far.call("open", url=at, seed=50)
    assert near.call("meet", url=at)
    assert far.call("write", url=own, near=[0], far=[0]) == 1
    near.kill()
    near.reap()
    assert not far.call("knows", url=own)
    with HostProcess(program=P2P_PROGRAM) as again:
        again.call("open", url=own, seed=90)
        assert again.call("meet", url=at)
        assert far.call("knows", url=own)
        assert far.call("write", url=own, near=[1], far=[1]) == 1
        assert again.call("content")[:3] == [90, 51, 92]
