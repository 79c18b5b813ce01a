"""The pairs of processes that every transport on a CPU is tested with.

A test of one kind alone says ``@pytest.mark.parametrize("kind", [SHM_SHARED], indirect=True)``.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from cache_content import CacheShape
from peer_process import ChildProcess, InThisProcess, RemotePeer
from transport_pairs import KINDS, Kind, LinkPair, Pair, linked, require_available


@pytest.fixture(scope="module", params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    require_available(chosen)
    return chosen


@pytest.fixture(scope="module")
def remote(kind: Kind) -> Iterator[RemotePeer]:
    """The far side, which the tests of a module share; each opens its own cache there."""
    far: RemotePeer = ChildProcess() if kind.in_two_processes else InThisProcess()
    try:
        yield far
    finally:
        far.close()


@pytest.fixture
def heard_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that live hear of the end of a connection, however late."""
    monkeypatch.setattr("kvxfer.session.meeting._LEAVE_S", 20.0)


@pytest.fixture
def pair(kind: Kind, remote: RemotePeer) -> Iterator[Pair]:
    """Two small caches of one layout, linked."""
    with linked(kind, remote) as made:
        yield made


@pytest.fixture
def link_pair(kind: Kind, remote: RemotePeer) -> LinkPair:
    """Makes a linked pair of given shapes (far, then near), as a context manager."""

    def link(*shapes: CacheShape, **args: Any) -> AbstractContextManager[Pair]:
        return linked(kind, remote, *shapes, **args)

    return link
