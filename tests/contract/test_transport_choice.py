"""What `auto` takes between two real endpoints, and what it says where that is not the best."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_pairs import NIXL, UCX, Kind, require_available

from kvxfer import Endpoint, KVCache, KVLayout, Receiver, Sender, shared_empty
from kvxfer.errors import NotAvailable, VerificationError
from kvxfer.transport import Link, Transports, available_transports
from kvxfer.transport.shm import ShmTransport

_PROGRAM = Path(__file__).parents[1] / "helpers" / "denied_attach.py"
DEADLINE_S = 60.0
LAYOUT = KVLayout(2, 2, head_dim=16, dtype="uint8", block_size=4)
_HERE = available_transports()
_HAS_NETWORK = _HERE["ucx"].available or _HERE["nixl"].available


def denied(strictness: str) -> tuple[str, str]:
    """What ``auto`` does where the kernel denies cross-memory attach: what it prints and logs."""
    done = subprocess.run(
        [sys.executable, str(_PROGRAM), strictness],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd="/",  # in a source tree Python would find a kvxfer/ without _core
        check=True,
    )
    return done.stdout.strip(), done.stderr


@pytest.mark.skipif(not _HAS_NETWORK, reason="neither ucx nor nixl is here")
def test_denied_memory_goes_over_ucx_or_nixl_with_a_warning() -> None:
    name = "nixl" if _HERE["nixl"].available else "ucx"
    path, log = denied("lenient")
    assert path.startswith(name)
    warnings = [line for line in log.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert f"{name} carries the bytes" in warnings[0]
    assert "the kernel denies access to its memory" in warnings[0]


@pytest.mark.skipif(not _HAS_NETWORK, reason="neither ucx nor nixl is here")
def test_denied_memory_over_ucx_or_nixl_is_an_error_where_strict() -> None:
    said, log = denied("strict")
    assert said.startswith("VerificationError: shm does not reach")
    assert "denies access" in said
    assert "WARNING" not in log


@pytest.mark.skipif(_HAS_NETWORK, reason="ucx or nixl is here")
@pytest.mark.parametrize("strictness", ["lenient", "strict"])
def test_denied_memory_and_no_network_is_an_error_with_all_remedies(strictness: str) -> None:
    said, _ = denied(strictness)
    if strictness == "strict":
        assert said.startswith("VerificationError: shm does not reach")
        return
    assert said.startswith("NotAvailable: nothing reaches")
    for remedy in ("ptrace_scope=0", "shared segment", "libucx-cu13", "pip install nixl-cu13"):
        assert remedy in said


def caches() -> tuple[KVCache, KVCache]:
    far = KVCache(LAYOUT, shared_empty(4 * LAYOUT.block_bytes))
    return far, KVCache(LAYOUT, np.ones(4 * LAYOUT.block_bytes, np.uint8))


def test_a_link_that_is_not_taken_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    link = ShmTransport.link

    def noted(self: ShmTransport, *args: Any) -> Link:
        made.append(link(self, *args))
        return made[-1]

    def refuse(*args: object) -> None:
        raise VerificationError("too slow")

    monkeypatch.setattr(ShmTransport, "link", noted)
    monkeypatch.setattr("kvxfer.transport.choice.TransportOffers.took", refuse)
    far, near = caches()
    with far, near, Endpoint(far) as there, Endpoint(near) as here:
        with pytest.raises(VerificationError, match="too slow"):
            here.connect(there.addresses)
        (one,) = made
        assert one._pool is None


def test_shared_memory_is_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    far, near = caches()
    with (
        far,
        near,
        Endpoint(far) as there,
        Endpoint(near, strict=True) as here,
        here.connect(there.addresses) as peer,
    ):
        assert peer.put([0], [1]).actual_path.startswith("shared segment")
    assert caplog.messages == []


@pytest.mark.parametrize("kind", [UCX, NIXL], ids=str)
def test_a_peer_of_this_host_that_serves_a_network_alone_is_told(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    require_available(kind)
    far, near = caches()
    with (
        caplog.at_level(logging.WARNING),
        far,
        near,
        Endpoint(far, transport=kind.transport) as there,
        Endpoint(near) as here,
        here.connect(there.addresses) as peer,
    ):
        peer.put([0], [1]).wait(DEADLINE_S)
    (told,) = caplog.messages
    assert f"{kind.transport} carries the bytes" in told
    assert "which does not serve shm" in told


def test_a_sender_tries_what_else_there_is_and_says_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No link by shm, say another pid namespace: the next is asked for, by the same sender."""

    def refuse(*_: object) -> None:
        raise NotAvailable("planted: it is in another pid namespace")

    far, near = caches()
    with far, near, Receiver(far) as receiver, Sender(near) as sender:
        monkeypatch.setattr(ShmTransport, "link", refuse)
        monkeypatch.setattr(Transports, "get", only_shm(Transports.get))
        handle = sender.send("one", [0], to=receiver.addresses)
        with pytest.raises(NotAvailable, match=r"nothing reaches .*shm: planted.*no nixl.*no ucx"):
            handle.wait(DEADLINE_S)


def only_shm(get: object) -> object:
    def wrapped(self: Transports, name: str) -> object:
        if name != "shm":
            raise NotAvailable(f"planted: no {name}")
        return get(self, name)  # type: ignore[operator]

    return wrapped
