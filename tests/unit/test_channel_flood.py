"""More than a channel can take: memory stays flat, and everybody else is served."""

import ctypes
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest
import zmq
from leaks import private_bytes, private_growth
from zmtp import raw_dealer

from kvxfer.control import ControlClient, ControlServer, encode
from kvxfer.control.framing import encode_limit

GUARD_S = 120.0  # far above what is waited for; it only keeps a failure from hanging
FREED_WITHIN_S = 60.0
MIB = 1 << 20


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    num_bytes: int = 0
    padding: bytes = b""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    data: bytes


@pytest.fixture
def server() -> Iterator[ControlServer]:
    handlers = {Ask: lambda message: Answer(bytes(message.num_bytes))}
    with ControlServer({"ask": handlers}) as running:
        yield running


def until(condition: Callable[[], Any]) -> None:
    end_s = time.monotonic() + GUARD_S
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.005)
    assert condition()


def check_serves(server: ControlServer, num_calls: int = 20) -> None:
    with ControlClient(server.addresses["ask"], Answer, deadline_s=GUARD_S) as client:
        for _ in range(num_calls):
            assert client.call(Ask(3)) == Answer(b"\0\0\0")


def request(message: msgspec.Struct) -> list[bytes]:
    return [b"id", *encode(message), encode_limit(GUARD_S)]


@contextmanager
def bare_dealer(address: str, **options: int) -> Iterator["zmq.Socket[bytes]"]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    for name, value in options.items():
        setattr(dealer, name, value)
    dealer.connect(address)
    try:
        yield dealer
    finally:
        context.destroy(linger=0)


@contextmanager
def flood(address: str, message: msgspec.Struct) -> Iterator[list[int]]:
    """Requests without an end, whose answers nobody reads, while the block runs."""
    stop = threading.Event()
    num_sent = [0]
    parts = request(message)

    def send() -> None:
        with bare_dealer(address, rcvhwm=1, sndhwm=100) as dealer:
            while not stop.is_set():
                with suppress(zmq.Again):
                    dealer.send_multipart(parts, zmq.NOBLOCK)
                    num_sent[0] += 1

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield num_sent
    finally:
        stop.set()
        thread.join(GUARD_S)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "message", [Ask(), Ask(padding=bytes(4 * MIB)), Ask(4 * MIB)], ids=["small", "large", "echo"]
)
def test_a_flood_delays_others_but_does_not_stop_them(server: ControlServer, message: Ask) -> None:
    with private_growth() as growth, flood(server.addresses["ask"], message) as num_sent:
        until(lambda: num_sent[0] > 20)
        check_serves(server)
    # 4 requests and 16 answers of 4 MiB, what the flood's own sockets hold, and what is on its way.
    assert growth.peak_bytes < 640 * MIB
    check_serves(server)


def test_answers_that_nobody_reads_are_counted_and_take_no_memory(server: ControlServer) -> None:
    address = server.addresses["ask"]
    with bare_dealer(address, rcvhwm=1) as dealer, private_growth() as growth:
        for _ in range(400):
            dealer.send_multipart(request(Ask(MIB)))
        until(lambda: server.undelivered["ask"] > 300)
        check_serves(server)
    assert growth.peak_bytes < 150 * MIB


NUM_PARTS = 1_000_000


def kept_bytes() -> int:
    """Private memory without what the allocator keeps for the next to ask."""
    ctypes.CDLL(None).malloc_trim(0)
    return private_bytes()


def send_million_parts(server: ControlServer, last: bytes) -> None:
    """Empty parts; two bytes each on the wire, more in libzmq's memory."""
    port = int(server.addresses["ask"].rpartition(":")[2])
    before = server.dropped["ask"]
    with raw_dealer(port, timeout_s=GUARD_S) as raw:
        raw.sendall(b"\x01\x00" * (NUM_PARTS - 1) + last)
        if last:
            until(lambda: server.dropped["ask"] > before)
        else:
            check_serves(server)


@pytest.mark.parametrize("last", [b"\x00\x00", b""], ids=["ends", "ends-with-the-connection"])
def test_a_million_parts_leave_no_memory_behind(server: ControlServer, last: bytes) -> None:
    before = private_bytes()
    for _ in range(2):
        send_million_parts(server, last)
        check_serves(server)
    end_s = time.monotonic() + FREED_WITHIN_S
    while (kept := kept_bytes() - before) >= 16 * MIB and time.monotonic() < end_s:
        time.sleep(0.005)  # libzmq frees in its own thread
    assert kept < 16 * MIB


def test_connections_that_say_nothing_stop_nobody(server: ControlServer) -> None:
    port = int(server.addresses["ask"].rpartition(":")[2])
    raws = [socket.create_connection(("127.0.0.1", port), GUARD_S) for _ in range(200)]
    check_serves(server)
    for raw in raws:
        raw.close()
    check_serves(server)


_LEFT_OPEN = """
import msgspec, sys, zmq
from kvxfer.control import *
server = ControlServer({"a": {CommitRequest: lambda m: DeferredReply()}}, on_gone=print)
dead = ControlClient("tcp://127.0.0.1:1", Done, deadline_s=0.2)
live = ControlClient(server.addresses["a"], Done, deadline_s=0.2)
for client in (dead, live):
    try:
        client.call(CommitRequest("r"))
    except TimeoutError:
        pass
print("done")
"""


def test_a_process_that_closes_nothing_ends_all_the_same() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _LEFT_OPEN], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "done\n"
