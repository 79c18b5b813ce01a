"""Channels with a key: who gets in, what a key file must be, and that the secret shows nowhere."""

import copy
import logging
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq
from free_ports import free_port

from kvxfer.control import CommitRequest, ControlClient, ControlServer, Done, SharedKey
from kvxfer.control.calls import Calls
from kvxfer.errors import ControlTimeout, InvalidUsage, KvxferError, NotAvailable

GUARD_S = 20.0  # far above what is waited for; it only keeps a failure from hanging
REFUSED_S = 3.0  # all of it is waited for; long enough to see on a busy machine how a meeting fails
HANDLERS = {"alloc": {CommitRequest: lambda message: Done(message.request_id)}}


@pytest.fixture
def key(tmp_path: Path) -> SharedKey:
    return SharedKey.create(tmp_path / "key")


@pytest.fixture
def other(tmp_path: Path) -> SharedKey:
    return SharedKey.create(tmp_path / "other")


def test_holders_of_the_file_get_in(key: SharedKey) -> None:
    with (
        ControlServer(HANDLERS, key=key) as server,
        ControlClient(
            server.addresses["alloc"], Done, key=SharedKey.read(key.path), deadline_s=GUARD_S
        ) as client,
    ):
        assert [client.call(CommitRequest(f"r{n}")).request_id for n in range(3)] == [
            "r0",
            "r1",
            "r2",
        ]
        assert server.num_unadmitted == 0


class HalfKey:
    """Knows the public half of a key, and has a secret of its own."""

    def __init__(self, public: bytes) -> None:
        self.public = public

    def present(self, dealer: "zmq.Socket[bytes]") -> None:
        own_public, own_secret = zmq.curve_keypair()
        dealer.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, own_public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, own_secret)


@pytest.mark.parametrize(
    ("holder", "kind", "text"),
    [
        ("another", ControlTimeout, "as one with another key does.*nothing was sent"),
        ("none", ControlTimeout, "one side has a key and the other has none.*nothing was sent"),
        ("half", NotAvailable, "was not sent: the peer does not admit this key"),
    ],
)
def test_others_do_not_get_in_and_learn_why(
    key: SharedKey, other: SharedKey, holder: str, kind: type[KvxferError], text: str
) -> None:
    keys = {"another": other, "none": None, "half": HalfKey(key._public)}
    seen: list[str] = []

    def commit(message: CommitRequest) -> Done:
        seen.append(message.request_id)
        return Done(message.request_id)

    with ControlServer({"alloc": {CommitRequest: commit}}, key=key) as server:
        address = server.addresses["alloc"]
        with (
            ControlClient(address, Done, key=keys[holder]) as client,  # type: ignore[arg-type]
            pytest.raises(kind, match=text),
        ):
            client.call(CommitRequest("bad"), deadline_s=REFUSED_S)
        assert (server.num_unadmitted > 0) == (holder == "half")
        with ControlClient(address, Done, key=key, deadline_s=GUARD_S) as client:
            assert client.call(CommitRequest("good")) == Done("good")
    assert seen == ["good"]


def test_a_key_that_is_not_admitted_is_no_timeout(key: SharedKey) -> None:
    """Not with a deadline far away either, and not by one of many calls."""
    half: Any = HalfKey(key._public)
    with ControlServer(HANDLERS, key=key) as server:
        address = server.addresses["alloc"]
        with ControlClient(address, Done, key=half, deadline_s=GUARD_S) as client:
            for _ in range(2):  # the second over a connection of its own
                with pytest.raises(NotAvailable, match="give both sides the same key"):
                    client.call(CommitRequest("bad"))
        assert server.num_unadmitted >= 2
        with Calls(half) as calls:
            answers: list[Any] = []
            line = calls.open(address, Done)
            line.start(CommitRequest("bad"), deadline_s=GUARD_S, on_answer=answers.append)
            while not answers:
                calls.run(GUARD_S)
        assert isinstance(answers[0], NotAvailable)
        assert "does not admit this key" in str(answers[0])


def test_a_client_calls_again_after_a_foreign_greeting(key: SharedKey) -> None:
    """libzmq gives up the connection to what is no ZMTP peer; the next call makes another."""
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port)) as foreign,
        ControlClient(f"tcp://127.0.0.1:{port}", Done, key=key) as client,
    ):
        greeter = threading.Thread(target=greet, args=(foreign,))
        greeter.start()
        has_greeted = False
        while not has_greeted:  # before the call, so that it had what was greeted
            has_greeted = not greeter.is_alive()
            with pytest.raises(ControlTimeout, match="nothing was sent"):
                client.call(CommitRequest("r"), deadline_s=0.5)
        foreign.close()
        with ControlServer(HANDLERS, ports={"alloc": port}, key=key):
            assert client.call(CommitRequest("r"), deadline_s=GUARD_S) == Done("r")


def greet(listener: socket.socket) -> None:
    """As sshd does, to whoever comes first."""
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")
        connection.recv(1024)


def test_a_client_with_a_key_does_not_talk_to_a_server_without(key: SharedKey) -> None:
    with (
        ControlServer(HANDLERS) as server,
        ControlClient(server.addresses["alloc"], Done, key=key) as client,
        pytest.raises(ControlTimeout, match="the other has none"),
    ):
        client.call(CommitRequest("r"), deadline_s=REFUSED_S)


class Relay:
    """Passes one connection on to a port, and keeps all that it sees."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, args=(port,), daemon=True)
        self._thread.start()

    def _run(self, port: int) -> None:
        near, _ = self._listener.accept()
        with near, socket.create_connection(("127.0.0.1", port)) as far, self._listener:
            other = {near: far, far: near}
            while True:
                for source in select.select([near, far], [], [])[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    self.seen += data
                    other[source].sendall(data)

    def end(self) -> None:
        self._thread.join(GUARD_S)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("guarded", [True, False])
def test_what_is_sent_can_be_read_on_the_way_without_a_key_only(
    key: SharedKey, guarded: bool
) -> None:
    used = key if guarded else None
    with ControlServer(HANDLERS, key=used) as server:
        relay = Relay(int(server.addresses["alloc"].rpartition(":")[2]))
        with ControlClient(relay.address, Done, key=used, deadline_s=GUARD_S) as client:
            assert client.call(CommitRequest("very-private")) == Done("very-private")
        relay.end()
    assert (b"very-private" in relay.seen) == (not guarded)
    assert (b"CURVE" in relay.seen) == guarded
    assert key._secret not in relay.seen


def test_beyond_loopback_a_key_or_a_word_is_needed(key: SharedKey) -> None:
    outside = {"bind_host": "0.0.0.0", "advertise_host": "192.0.2.7"}
    with pytest.raises(InvalidUsage, match=r"0.0.0.0 lets other hosts in.*insecure=True"):
        ControlServer(HANDLERS, **outside)  # type: ignore[arg-type]
    ControlServer(HANDLERS, key=key, **outside).close()  # type: ignore[arg-type]
    ControlServer(HANDLERS, insecure=True, **outside).close()  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o666, 0o777])
def test_a_file_that_others_reach_is_refused(key: SharedKey, mode: int) -> None:
    key.path.chmod(mode)
    with pytest.raises(InvalidUsage, match=f"has mode {mode:04o}.*chmod 600"):
        SharedKey.read(key.path)


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o700])
def test_a_file_of_its_owner_is_read(key: SharedKey, mode: int) -> None:
    key.path.chmod(mode)
    assert SharedKey.read(str(key.path))._secret == key._secret


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 40, b"~" * 40, b"a" * 41, b"a" * 9999]
)
def test_a_file_without_a_key_is_refused_and_not_quoted(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InvalidUsage, match="holds") as info:
        SharedKey.read(path)
    error: BaseException | None = info.value
    while error is not None:
        assert not content or content.decode("latin-1") not in str(error)
        error = error.__cause__


def test_no_file_no_directory_no_second_key(tmp_path: Path, key: SharedKey) -> None:
    with pytest.raises(InvalidUsage, match="cannot be read: No such file"):
        SharedKey.read(tmp_path / "absent")
    with pytest.raises(InvalidUsage, match="cannot be read"):
        SharedKey.read(tmp_path)
    before = key.path.read_bytes()
    with pytest.raises(InvalidUsage, match="cannot be made, for it exists; use it as it is"):
        SharedKey.create(key.path)
    assert key.path.read_bytes() == before
    device = tmp_path / "device"
    device.symlink_to("/dev/null")
    with pytest.raises(InvalidUsage, match=r"not a regular file|mode"):
        SharedKey.read(device)


def test_a_new_key_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        SharedKey.create(tmp_path / "key")
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_two_keys_differ(key: SharedKey, other: SharedKey) -> None:
    assert key._secret != other._secret


def test_the_secret_shows_nowhere(
    key: SharedKey, other: SharedKey, caplog: pytest.LogCaptureFixture
) -> None:
    secret = key._secret.decode()
    assert secret in key.path.read_text()
    with caplog.at_level(logging.DEBUG), ControlServer(HANDLERS, key=key) as server:
        with (
            ControlClient(server.addresses["alloc"], Done, key=other) as client,
            pytest.raises(ControlTimeout) as info,
        ):
            client.call(CommitRequest("r"), deadline_s=0.2)
        shown = [str(info.value), repr(server), repr(client), repr(vars(server))]
    shown += [repr(key), str(key), f"{key}", caplog.text, *map(repr, sys.argv), repr(os.environ)]
    assert all(secret not in text for text in shown)
    assert str(key.path) in repr(key)
    for copier in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(InvalidUsage, match="does not travel"):
            copier(key)


def test_a_libzmq_without_curve_is_named(monkeypatch: pytest.MonkeyPatch, key: SharedKey) -> None:
    monkeypatch.setattr(zmq, "has", lambda feature: feature != "curve")
    for make in (SharedKey.read, SharedKey.create):
        with pytest.raises(NotAvailable, match="without CURVE"):
            make(key.path)


_OPTIMIZED = """
import sys, zmq
from kvxfer.control import *
from kvxfer.errors import KvxferError
assert False, "asserts run"
key = SharedKey.read(sys.argv[1])
with ControlServer({"a": {CommitRequest: lambda m: Done(m.request_id)}}, key=key) as server:
    class Half:
        def present(self, dealer):
            public, secret = zmq.curve_keypair()
            dealer.curve_serverkey, dealer.curve_publickey = key._public, public
            dealer.curve_secretkey = secret
    with ControlClient(server.addresses["a"], Done, key=Half(), deadline_s=9.0) as client:
        try:
            client.call(CommitRequest("bad"))
        except KvxferError as error:
            print("refused", server.num_unadmitted > 0)
"""


def test_the_check_is_no_assert(key: SharedKey) -> None:
    result = subprocess.run(
        [sys.executable, "-O", "-c", _OPTIMIZED, str(key.path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.split() == ["refused", "True"]
