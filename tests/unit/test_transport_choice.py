"""The rule of `auto`: what is offered to a peer, in which order, what is said of a slow path."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from kvxfer.errors import InvalidUsage, NotAvailable, ProtocolMismatch, VerificationError
from kvxfer.memory import MemoryKind
from kvxfer.transport import (
    TRANSPORTS,
    Availability,
    Board,
    Capabilities,
    Transport,
    TransportOffers,
    Transports,
    candidates,
    choose,
)
from kvxfer.transport.choice import slow_path

PEER = "tcp://10.0.0.7:4001"


class Fake(Transport):
    """Of whatever name; not here where it is among the missing."""

    missing: tuple[str, ...] = ()

    def __init__(self, num_threads: int | None = None) -> None:
        self.served_on = ""

    @classmethod
    def probe(cls) -> Availability:
        return Availability(cls.name not in cls.missing, f"no {cls.name} here")

    def serve(self, board: Board, bind_host: str) -> None:
        self.served_on = bind_host

    def export(self, registration: Any) -> Any:
        raise NotImplementedError

    def link(self, cache: Any, regions: Sequence[bytes], board: bytes) -> Any:
        raise NotImplementedError


def fake(name: str, memory: MemoryKind, crosses: bool, missing: Sequence[str]) -> type[Transport]:
    capabilities = Capabilities(frozenset({memory}), cross_process=True, crosses_hosts=crosses)
    return type(
        f"Fake_{name}",
        (Fake,),
        {"name": name, "capabilities": capabilities, "missing": tuple(missing)},
    )


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fakes of host memory, and the names of those that are not here."""
    names: list[str] = []
    for name in ("shm", "ucx", "nixl"):
        kind = fake(name, MemoryKind.HOST, name != "shm", ())
        monkeypatch.setattr(
            kind, "probe", lambda name=name: Availability(name not in names, f"no {name} here")
        )
        monkeypatch.setitem(TRANSPORTS, name, kind)
    return names


def transports(asked: str | Transport = "auto", *, strict: bool = False) -> Transports:
    return Transports(
        asked, memory=MemoryKind.HOST, board=Board(), bind_host="127.0.0.1", strict=strict
    )


def here(**options: Any) -> TransportOffers:
    return TransportOffers(transports(**options), is_here=True, peer=PEER)


def own_board() -> bytes:
    board = Board()
    return board.describe(board.take_slot())


def test_mapped_memory_comes_before_networks() -> None:
    assert candidates(MemoryKind.HOST) == ("shm", "nixl", "ucx")
    assert candidates(MemoryKind.HOST, beyond_host=True) == ("nixl", "ucx")
    assert candidates(MemoryKind.DEVICE)[0] == "nvlink"
    assert "nvlink" not in candidates(MemoryKind.DEVICE, beyond_host=True)


def test_the_first_that_works_is_chosen(missing: list[str]) -> None:
    assert choose(MemoryKind.HOST) == "shm"
    assert choose(MemoryKind.HOST, beyond_host=True) == "nixl"
    missing.append("nixl")
    assert choose(MemoryKind.HOST, beyond_host=True) == "ucx"
    missing.append("ucx")
    with pytest.raises(NotAvailable, match=r"reaches other hosts.*no nixl here; ucx: no ucx here"):
        choose(MemoryKind.HOST, beyond_host=True)


@pytest.mark.usefixtures("missing")
def test_a_transport_is_made_once_and_told_where_it_listens() -> None:
    made = transports()
    assert made.first is made.get("shm")
    ucx = made.get("ucx")
    assert isinstance(ucx, Fake)
    assert ucx.served_on == "127.0.0.1"
    assert made.get("ucx") is ucx


def test_what_is_asked_for_by_name_is_all_there_is(missing: list[str]) -> None:
    assert transports("ucx").names == ("ucx",)
    missing.append("ucx")
    with pytest.raises(NotAvailable, match="transport ucx: no ucx here"):
        transports("ucx")
    with pytest.raises(InvalidUsage, match="is unknown"):
        transports("teleport")
    own = fake("mine", MemoryKind.HOST, True, ())()
    assert transports(own).first is own
    assert TransportOffers(transports(own), is_here=False, peer=PEER).names == ["mine"]


@pytest.mark.usefixtures("missing")
def test_another_host_is_offered_what_crosses_hosts() -> None:
    assert here().names == ["shm", "nixl", "ucx"]
    assert TransportOffers(transports(), is_here=False, peer=PEER).names == ["nixl", "ucx"]


@pytest.mark.usefixtures("missing")
def test_a_transport_that_was_not_offered_is_refused() -> None:
    for name in ("nvlink", "x" * 100_000):
        with pytest.raises(ProtocolMismatch, match="chose transport") as caught:
            here().get(name)
        assert len(str(caught.value)) < 300


@pytest.mark.usefixtures("missing")
def test_what_fails_is_offered_no_more_until_nothing_is_left() -> None:
    offers = here()
    offers.drop("shm", NotAvailable("access denied"))
    assert offers.names == ["nixl", "ucx"]
    offers.drop("nixl", NotAvailable("no agent"))
    with pytest.raises(NotAvailable, match=r"shm: access denied; nixl: no agent; no route"):
        offers.drop("ucx", NotAvailable("no route"))


@pytest.mark.usefixtures("missing")
def test_the_only_one_fails_with_its_own_error() -> None:
    error = NotAvailable("access denied", 13)
    with pytest.raises(NotAvailable) as caught:
        here(asked="shm").drop("shm", error)
    assert caught.value is error


@pytest.mark.usefixtures("missing")
def test_a_fall_from_mapped_memory_is_an_error_where_strict() -> None:
    with pytest.raises(VerificationError, match="access denied"):
        here(strict=True).drop("shm", NotAvailable("access denied"))
    far = TransportOffers(transports(strict=True), is_here=False, peer=PEER)
    far.drop("ucx", NotAvailable("no route"))  # from one network to another
    assert far.names == ["nixl"]


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize(
    ("name", "is_here", "text"),
    [
        ("shm", True, ""),
        ("ucx", True, "does not serve shm"),
        ("nixl", True, "does not serve shm"),
        ("ucx", False, "is a process of this host"),
    ],
)
def test_a_network_within_a_host_is_told_once(
    caplog: pytest.LogCaptureFixture, name: str, is_here: bool, text: str
) -> None:
    offers = TransportOffers(transports(), is_here=is_here, peer=PEER)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            offers.took(name, f"{name} path", own_board())
    assert len(caplog.messages) == bool(text)
    assert all(text in told for told in caplog.messages)
    strict = TransportOffers(transports(strict=True), is_here=is_here, peer=PEER)
    if text:
        with pytest.raises(VerificationError, match=text):
            strict.took(name, f"{name} path", own_board())
    else:
        strict.took(name, f"{name} path", own_board())


@pytest.mark.usefixtures("missing")
def test_a_network_to_another_host_and_one_that_was_asked_for_are_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        TransportOffers(transports(strict=True), is_here=False, peer=PEER).took(
            "ucx", "ucx rc", b"far"
        )
        here(asked="ucx", strict=True).took("ucx", "ucx tcp/lo", own_board())
    assert caplog.messages == []


def test_nvlink_that_is_pcie_is_a_slow_path() -> None:
    assert "share no NVLink" in slow_path("nvlink", "pcie, bulk kernel put")
    assert slow_path("nvlink", "nvlink, bulk kernel put") == ""
    assert slow_path("nvlink", "same device") == ""
    assert slow_path("shm", "shared segment") == ""
