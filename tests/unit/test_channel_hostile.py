"""Control channels against bytes that no kvxfer sends, and against leaks."""

import gc
import itertools
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from leaks import private_growth
from zmtp import GREETING, READY, is_cut, raw_dealer

from kvxfer.control import CommitRequest, ControlClient, ControlServer, Done, encode
from kvxfer.control import _sockets as sockets
from kvxfer.control.framing import MAX_MESSAGE_BYTES

GUARD_S = 20.0  # far above what is waited for; it only keeps a failure from hanging


class Target:
    """A serving channel, and what reached its handler."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.server = ControlServer({"alloc": {CommitRequest: self._commit}})
        self.address = self.server.addresses["alloc"]
        self.port = int(self.address.rpartition(":")[2])

    def _commit(self, message: CommitRequest) -> Done:
        self.seen.append(message.request_id)
        return Done(message.request_id)

    def check_serves(self) -> None:
        with ControlClient(self.address, Done, deadline_s=GUARD_S) as client:
            assert client.call(CommitRequest("good")) == Done("good")
        assert set(self.seen) == {"good"}

    def wait_for_dropped(self, number: int) -> None:
        end_s = time.monotonic() + GUARD_S
        while self.server.dropped["alloc"] < number and time.monotonic() < end_s:
            time.sleep(0.01)
        assert self.server.dropped == {"alloc": number}


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    with made.server:
        yield made


@pytest.fixture
def dealer(target: Target) -> Iterator["zmq.Socket[bytes]"]:
    """A bare DEALER that is connected to the target and has none of our limits."""
    context = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.connect(target.address)
    made.rcvtimeo = int(GUARD_S * 1000)
    yield made
    context.destroy(linger=0)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.marker,))


def test_the_pickle_of_the_next_test_does_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Evil(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


def test_a_pickle_runs_nothing(target: Target, dealer: "zmq.Socket[bytes]", tmp_path: Path) -> None:
    evil = pickle.dumps(Evil(tmp_path / "marker"))
    dealer.send(evil)
    dealer.send_multipart([b"id", evil, evil])
    target.wait_for_dropped(2)
    dealer.send_multipart([b"id", encode(Done("x"))[0], evil])
    call_id, _, body = dealer.recv_multipart()
    assert call_id == b"id"
    assert b"ProtocolMismatch" in body
    with socket.create_connection(("127.0.0.1", target.port), GUARD_S) as raw:
        raw.sendall(evil)
    target.check_serves()
    assert target.server.refused == {"alloc": 1}
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"", b""],
        [b"id", b"KVXF"],
        [b"id", b"GET / HTTP/1.1\r\n\r\n", b""],
        [b"", *encode(CommitRequest("bad"))],
        [b"i" * 33, *encode(CommitRequest("bad"))],
        encode(CommitRequest("bad")),
        [b"id", *encode(CommitRequest("bad")), *[b"x"] * 5],
        [b"id", *encode(CommitRequest("bad")), *[b"x"] * 997],
        [b"x"] * 100_000,
    ],
    ids=lambda parts: f"{len(parts)}-parts",
)
def test_foreign_messages_are_dropped_and_counted(
    target: Target, dealer: "zmq.Socket[bytes]", parts: list[bytes]
) -> None:
    dealer.send_multipart(parts)
    target.wait_for_dropped(1)
    target.check_serves()
    assert not dealer.poll(0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91" * 200 + b"\x01",
        b"\x91" * 100_000,
        encode(CommitRequest("bad"))[1][:-1],
        encode(Done("bad"))[1],
        encode(CommitRequest("b" * 257))[1],
        bytes(MAX_MESSAGE_BYTES),
    ],
    ids=["empty", "never-used", "nested", "deeper", "cut", "other-type", "long-id", "16-MiB"],
)
def test_bad_bodies_are_answered_with_protocol_mismatch(
    target: Target, dealer: "zmq.Socket[bytes]", body: bytes
) -> None:
    head = encode(CommitRequest("bad"))[0]
    dealer.send_multipart([b"id", head, body])
    call_id, reply_head, reply = dealer.recv_multipart()
    assert (call_id, reply_head) == (b"id", head)
    assert b"ProtocolMismatch" in reply
    target.check_serves()
    assert (target.server.dropped, target.server.refused) == ({"alloc": 0}, {"alloc": 1})


def test_another_version_learns_ours(target: Target, dealer: "zmq.Socket[bytes]") -> None:
    dealer.send_multipart([b"id", b"KVXF\x00\x01", b"\xc1"])
    _, head, reply = dealer.recv_multipart()
    assert head == b"KVXF\x00\x05"
    assert b"version 1, this side 5" in reply
    target.check_serves()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        bytes(range(256)) * 64,
        GREETING[:20],
        GREETING + READY + b"\x01\x02id",
    ],
    ids=["http", "tls", "bytes", "half-greeting", "frames-too-early"],
)
def test_raw_bytes_and_a_connection_that_ends(target: Target, data: bytes) -> None:
    with (
        socket.create_connection(("127.0.0.1", target.port), GUARD_S) as raw,
        suppress(ConnectionError),
    ):
        raw.sendall(data)
        target.check_serves()
    target.check_serves()


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x10half",
        b"\x01\x02id" + b"\x01\x06KVXF\x00\x05",
        b"\x02" + struct.pack(">Q", 1 << 10) + b"half",
    ],
    ids=["half-frame", "no-last-part", "half-long-frame"],
)
def test_a_connection_that_ends_within_a_message(target: Target, data: bytes) -> None:
    with raw_dealer(target.port, timeout_s=GUARD_S) as raw:
        raw.sendall(data)
        target.check_serves()
    target.check_serves()
    assert target.server.dropped == {"alloc": 0}


def test_a_mute_connection_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < sockets._OPTIONS[zmq.HANDSHAKE_IVL] <= 5000
    monkeypatch.setitem(sockets._OPTIONS, zmq.HANDSHAKE_IVL, 200)
    target = Target()
    with (
        target.server,
        socket.create_connection(("127.0.0.1", target.port), GUARD_S) as raw,
    ):
        target.check_serves()
        assert is_cut(raw)


@pytest.mark.parametrize("num_bytes", [MAX_MESSAGE_BYTES + 1, 1 << 30, 1 << 62, (1 << 64) - 1])
def test_a_frame_above_the_limit_is_cut_at_its_length(target: Target, num_bytes: int) -> None:
    with raw_dealer(target.port, timeout_s=GUARD_S) as raw, private_growth() as growth:
        raw.sendall(b"\x02" + struct.pack(">Q", num_bytes) + b"x")
        assert is_cut(raw)
        target.check_serves()
    assert growth.peak_bytes < 32 << 20


def test_a_frame_at_the_limit_is_not_cut(target: Target) -> None:
    with raw_dealer(target.port, timeout_s=GUARD_S) as raw:
        raw.sendall(b"\x02" + struct.pack(">Q", MAX_MESSAGE_BYTES) + bytes(MAX_MESSAGE_BYTES))
        target.wait_for_dropped(1)
    target.check_serves()


def test_a_32_mib_message_never_arrives(target: Target, dealer: "zmq.Socket[bytes]") -> None:
    dealer.send_multipart([b"id", encode(CommitRequest("bad"))[0], bytes(32 << 20)])
    target.check_serves()
    assert not dealer.poll(200)
    assert (target.server.dropped, target.server.refused) == ({"alloc": 0}, {"alloc": 0})


def num_fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a Path list would hold one more


def settle(before: int, settle_s: float) -> None:
    end_s = time.monotonic() + settle_s
    while num_fds() > before and time.monotonic() < end_s:
        time.sleep(0.02)
    assert num_fds() <= before, "descriptors leak"


def check_no_fd_leak(cycle: Callable[[], object], num_cycles: int, settle_s: float) -> None:
    """Fail where descriptors grow with cycles; the far end of a connection closes a bit later."""
    for _ in range(3):
        cycle()
    time.sleep(0.1)
    before = num_fds()
    for _ in range(num_cycles):
        cycle()
    settle(before, settle_s)


def test_clients_leak_no_descriptor(target: Target) -> None:
    check_no_fd_leak(target.check_serves, 50, GUARD_S)


def test_clients_beside_a_living_one_leak_no_descriptor(target: Target) -> None:
    with ControlClient(target.address, Done, deadline_s=GUARD_S) as living:
        check_no_fd_leak(target.check_serves, 50, GUARD_S)
        assert living.call(CommitRequest("good")) == Done("good")


def test_the_last_client_takes_the_shared_context_with_it(target: Target) -> None:
    before = num_fds()
    with ControlClient(target.address, Done) as one:
        with ControlClient(target.address, Done) as two:
            assert two._context is one._context
        assert one.call(CommitRequest("good"), deadline_s=GUARD_S) == Done("good")
    assert one._context.closed
    settle(before, GUARD_S)


def test_servers_leak_no_descriptor() -> None:
    def cycle() -> None:
        made = Target()
        with made.server:
            made.check_serves()

    check_no_fd_leak(cycle, 20, GUARD_S)


def test_failed_servers_and_clients_leak_no_descriptor(target: Target) -> None:
    handlers = {CommitRequest: Done}

    def cycle() -> None:
        with suppress(Exception):
            ControlServer({"a": handlers, "b": handlers}, ports={"b": target.port})
        with suppress(Exception):
            ControlClient("tcp://*:1", Done)

    check_no_fd_leak(cycle, 20, GUARD_S)


def test_the_leak_check_fails_on_a_planted_leak(target: Target) -> None:
    leaked: list[socket.socket] = []
    counter = itertools.count()

    def cycle() -> None:
        if next(counter) % 10 == 9:  # one descriptor in ten cycles is enough
            leaked.append(socket.socket())

    try:
        with pytest.raises(AssertionError, match="descriptors leak"):
            check_no_fd_leak(cycle, 50, 0.2)
    finally:
        for one in leaked:
            one.close()
