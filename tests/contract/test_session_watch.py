"""Signs of life of a receiver: from each kind there is, and where they are refused."""

from collections.abc import Callable

import pytest
from session_sides import check_received
from sessions import BLOCKS, Session, session
from waiting import GUARD_S, eventually

from kvxfer import Endpoint
from kvxfer.control import ControlClient, WatchReply, WatchRequest
from kvxfer.errors import NotAvailable
from kvxfer.session.request_book import RequestBook

__all__ = ["session"]  # the fixture


def test_a_pool_gives_signs_of_life(session: Session) -> None:
    cache = session.host(session.far).cache
    with (
        Endpoint(cache, transport="loopback") as pool,
        ControlClient(pool.addresses["alloc"], WatchReply) as client,
    ):
        for _ in range(2):
            assert client.call(WatchRequest("any"), deadline_s=GUARD_S) == WatchReply([])


@pytest.fixture
def num_refused(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Refuses every watch; returns how many there were."""
    refused: list[str] = []

    def refuse(self: RequestBook, connection: str) -> WatchReply:
        refused.append(connection)
        raise NotAvailable("too many answers are owed")

    monkeypatch.setattr(RequestBook, "watch", refuse)
    return lambda: len(refused)


def test_a_watch_that_is_refused_is_not_repeated_at_once(
    num_refused: Callable[[], int], monkeypatch: pytest.MonkeyPatch, session: Session
) -> None:
    monkeypatch.setattr("kvxfer.session.target._CALL_S", GUARD_S)
    for number in range(3):
        session.send(f"r-{number}").wait(GUARD_S)
        assert session.notice().ok
    assert num_refused() == 1


def test_a_watch_that_is_refused_is_repeated(
    num_refused: Callable[[], int], monkeypatch: pytest.MonkeyPatch, session: Session
) -> None:
    monkeypatch.setattr("kvxfer.session.target._CALL_S", 0.1)
    handle = session.send()
    handle.wait(GUARD_S)
    eventually(lambda: num_refused() >= 3, "it is not watched any more")
    check_received(session.far, BLOCKS, list(session.notice().block_ids))
