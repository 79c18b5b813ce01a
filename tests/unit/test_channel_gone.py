"""Peers that die, hang or leave: both sides hear of it, soon, and only of those that did."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from free_ports import free_port

from kvxfer.control import ControlClient, ControlServer
from kvxfer.errors import PeerLost

GUARD_S = 20.0  # far above what is waited for; it only keeps a failure from hanging


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    incarnation: str = ""
    pause_s: float = 0.0


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    pass


def welcome(message: Hello) -> Welcome:
    time.sleep(message.pause_s)
    return Welcome()


class Listener:
    """A server and whom it has heard going."""

    def __init__(self) -> None:
        self.gone: list[tuple[str, str]] = []
        self.server = ControlServer(
            {"a": {Hello: welcome}, "b": {Hello: welcome}},
            on_gone=lambda channel, name: self.gone.append((channel, name)),
        )

    def client(self, channel: str = "a") -> ControlClient[Welcome]:
        return ControlClient(self.server.addresses[channel], Welcome, deadline_s=GUARD_S)


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    with made.server:
        yield made


def until(condition: Callable[[], Any]) -> None:
    end_s = time.monotonic() + GUARD_S
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.002)
    assert condition()


_CALLER = """
import sys, time, msgspec
from kvxfer.control import ControlClient
class Hello(msgspec.Struct, frozen=True, tag="hello"):
    incarnation: str = ""
    pause_s: float = 0.0
class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    pass
client = ControlClient(sys.argv[1], Welcome)
client.call(Hello("child"))
print("ready", flush=True)
time.sleep(600)
"""
_SERVER = """
import time, msgspec
from kvxfer.control import ControlServer
class Hello(msgspec.Struct, frozen=True, tag="hello"):
    incarnation: str = ""
    pause_s: float = 0.0
class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    pass
def welcome(message):
    if message.pause_s:
        print("asked", flush=True)
        time.sleep(message.pause_s)
    return Welcome()
server = ControlServer({"a": {Hello: welcome}})
print(server.addresses["a"], flush=True)
time.sleep(600)
"""


@contextmanager
def process(source: str, *args: str) -> Iterator["subprocess.Popen[str]"]:
    child = subprocess.Popen(
        [sys.executable, "-c", source, *args], stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def line_of(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_a_client_that_leaves_is_reported_once_with_its_channel(listener: Listener) -> None:
    with listener.client("b") as stays:
        stays.call(Hello("stays"))
        with listener.client("a") as leaves:
            leaves.call(Hello("leaves"))
            assert listener.gone == []
        until(lambda: listener.gone)
        stays.call(Hello("stays"))
    until(lambda: len(listener.gone) == 2)
    assert listener.gone == [("a", "leaves"), ("b", "stays")]


def test_an_incarnation_is_gone_with_its_last_connection(listener: Listener) -> None:
    first, second = listener.client(), listener.client()
    first.call(Hello("twice"))
    first.call(Hello("once"))
    second.call(Hello("twice"))
    second.call(Hello(""))
    first.close()
    until(lambda: listener.gone)
    second.call(Hello("twice"))
    assert listener.gone == [("a", "once")]
    second.close()
    until(lambda: len(listener.gone) == 2)
    assert listener.gone[1] == ("a", "twice")


def test_many_clients_come_and_go_and_none_is_forgotten(listener: Listener) -> None:
    names = [f"c{number}" for number in range(100)]
    for name in names:
        with listener.client() as client:  # descriptors are used again at once
            client.call(Hello(name))
    until(lambda: len(listener.gone) == len(names))
    assert sorted(listener.gone) == sorted(("a", name) for name in names)
    channel = listener.server._channels[0]
    assert len(channel.callers) == 0
    assert not channel.callers._by_descriptor
    assert not channel.callers._speakers


def test_foreign_connections_end_nobody(listener: Listener) -> None:
    port = int(listener.server.addresses["a"].rpartition(":")[2])
    context = zmq.Context()
    with listener.client() as client:
        client.call(Hello("stays"))
        for _ in range(20):
            foreign = context.socket(zmq.DEALER)
            foreign.connect(f"tcp://127.0.0.1:{port}")
            foreign.send_multipart([b"id", b"nonsense"])
            foreign.close(linger=100)
        until(lambda: listener.server.dropped["a"] == 20)
        assert client.call(Hello("stays")) == Welcome()
        assert listener.gone == []
    context.destroy(linger=0)


def test_a_false_suspicion_passes(listener: Listener) -> None:
    callers = listener.server._channels[0].callers
    with listener.client() as client:
        client.call(Hello("stays"))
        for routing_id in list(callers._callers):
            callers._suspect(routing_id)
        for _ in range(5):  # the probes lie in the client's queue and are not taken for answers
            assert client.call(Hello("stays")) == Welcome()
            time.sleep(0.01)
        assert listener.gone == []


def test_what_on_gone_raises_stops_nothing() -> None:
    with ControlServer({"a": {Hello: welcome}}, on_gone=lambda *_: 1 // 0) as server:
        for _ in range(2):
            with ControlClient(server.addresses["a"], Welcome, deadline_s=GUARD_S) as client:
                assert client.call(Hello("x")) == Welcome()
            until(lambda: len(server._channels[0].callers) == 0)


def test_a_killed_client_is_gone(listener: Listener) -> None:
    with process(_CALLER, listener.server.addresses["a"]) as child:
        assert line_of(child) == "ready"
        assert listener.gone == []
        child.send_signal(signal.SIGKILL)
        until(lambda: listener.gone == [("a", "child")])


def test_a_call_ends_with_its_server() -> None:
    with process(_SERVER) as child:
        address = line_of(child)
        with ControlClient(address, Welcome, deadline_s=600.0) as client:
            assert client.call(Hello()) == Welcome()
            stop = threading.Thread(
                target=lambda: (line_of(child), os.kill(child.pid, signal.SIGKILL)), daemon=True
            )
            stop.start()
            with pytest.raises(PeerLost, match=f"{address} ended the connection before.*Hello"):
                client.call(Hello(pause_s=600.0))
            stop.join(GUARD_S)


def test_a_connection_that_ended_between_calls_spoils_no_call() -> None:
    ports = {"a": free_port()}
    first = ControlServer({"a": {Hello: welcome}}, ports=ports)
    with ControlClient(first.addresses["a"], Welcome, deadline_s=GUARD_S) as client:
        assert client.call(Hello()) == Welcome()
        first.close()
        until(lambda: not client._socket.poll(0, zmq.POLLOUT))
        with ControlServer({"a": {Hello: welcome}}, ports=ports):
            assert client.call(Hello(pause_s=0.3)) == Welcome()


def test_a_call_waits_for_a_peer_that_has_gone_not_as_long_as_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvxfer.control.client._RETURN_S", 0.2)
    monkeypatch.setattr("kvxfer.control.client._RETRY_S", 0.05)
    ports = {"a": free_port()}
    first = ControlServer({"a": {Hello: welcome}}, ports=ports)
    address = first.addresses["a"]
    with ControlClient(address, Welcome, deadline_s=GUARD_S) as client:
        assert client.call(Hello()) == Welcome()
        first.close()
        until(lambda: not client._socket.poll(0, zmq.POLLOUT))
        for _ in range(2):
            with pytest.raises(PeerLost, match=f"{address} ended the.*; Hello was not sent"):
                client.call(Hello())
        # Ctrl-C in a call makes a new socket, and does not make it forget.
        client._shut()
        client._open()
        with pytest.raises(PeerLost, match="Hello was not sent"):
            client.call(Hello())
        with ControlServer({"a": {Hello: welcome}}, ports=ports):
            until(lambda: client._socket.poll(0, zmq.POLLOUT))
            assert client.call(Hello()) == Welcome()
