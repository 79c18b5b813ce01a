"""Where channels bind and what they advertise, and which addresses a client dials."""

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from free_ports import free_port

from kvxfer.control import AbortRequest, CommitRequest, ControlClient, ControlServer, Done
from kvxfer.control import _sockets as sockets
from kvxfer.control.addresses import Resolved, parse_url, resolve_host
from kvxfer.errors import InvalidUsage, NotAvailable


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    number: int


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    number: int


def serve(**options: object) -> ControlServer:
    channels = {
        "alloc": {CommitRequest: lambda message: Done(message.request_id)},
        "ask": {Ask: lambda message: Answer(message.number + 1)},
    }
    return ControlServer(channels, **options)  # type: ignore[arg-type]


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")


def listening_hosts(port: int) -> set[str]:
    """The local addresses, as the kernel writes them, of the sockets that listen on a port."""
    hosts = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            host, _, number = local.rpartition(":")
            if state == "0A" and int(number, 16) == port:
                hosts.add(host)
    return hosts


def test_the_default_bind_listens_on_loopback_only() -> None:
    with serve() as server:
        for address in server.addresses.values():
            assert listening_hosts(int(address.rpartition(":")[2])) == {"0100007F"}


@pytest.mark.parametrize(
    ("channels", "options", "text"),
    [
        ({}, {}, "name at least one"),
        ({"": {}}, {}, "none of them empty"),
        ({"a": {}}, {}, "no message types"),
        ({"a": {dict: len}}, {}, "not a message type"),
    ],
)
def test_channels_that_cannot_be_served(
    channels: dict[str, object], options: dict[str, object], text: str
) -> None:
    with pytest.raises(InvalidUsage, match=text):
        ControlServer(channels, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ports": {"ask": 65536}}, "65536 of channel 'ask' is out of range"),
        ({"ports": {"ask": True}}, "True of channel 'ask'"),
        ({"ports": {"who": 1}}, "for channel 'who'"),
        ({"ports": {"ask": 4001, "alloc": 4001}}, "'alloc' and 'ask' both have port 4001"),
        ({"bind_host": "0.0.0.0"}, "wildcard.*advertise_host"),
        ({"bind_host": "*"}, "wildcard"),
        ({"bind_host": "::"}, "wildcard"),
        ({"bind_host": "0"}, "wildcard"),
        ({"bind_host": ""}, "empty"),
        ({"bind_host": "fe80::1%eth0"}, "zone id"),
        ({"bind_host": "0.0.0.0", "advertise_host": "0.0.0.0"}, "advertise_host.*wildcard"),
        ({"bind_host": "0.0.0.0", "advertise_host": "127.0.0.1"}, "is loopback"),
        ({"bind_host": "0.0.0.0", "advertise_host": "localhost"}, "is loopback"),
    ],
)
def test_binds_that_no_peer_could_use(options: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidUsage, match=text):
        serve(**options)


def test_a_wildcard_bind_advertises_what_it_is_given() -> None:
    with serve(bind_host="0.0.0.0", advertise_host="192.0.2.7", insecure=True) as server:
        assert server.addresses["ask"].startswith("tcp://192.0.2.7:")


def test_a_busy_port_is_named_with_its_channel_and_frees_the_others() -> None:
    with serve() as holder:
        busy, other = int(holder.addresses["ask"].rpartition(":")[2]), free_port()
        for _ in range(2):
            with pytest.raises(NotAvailable, match=f"port {busy} for channel ask is in use"):
                serve(ports={"alloc": other, "ask": busy})
    serve(ports={"alloc": other, "ask": busy}).close()


def test_an_address_of_another_host_cannot_be_bound() -> None:
    with pytest.raises(NotAvailable, match=r"cannot listen on tcp://192.0.2.7:0"):
        serve(bind_host="192.0.2.7", insecure=True)


@needs_ipv6
def test_ipv6_is_bracketed_and_served() -> None:
    with serve(bind_host="::1") as server:
        assert server.addresses["ask"].startswith("tcp://[::1]:")
        with ControlClient(server.addresses["ask"], Answer) as client:
            assert client.call(Ask(1)) == Answer(2)


@needs_ipv6
def test_a_name_with_only_ipv6_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [entry])
    with serve(bind_host="six.test") as server:
        port = server.addresses["ask"].rpartition(":")[2]
        with ControlClient(f"tcp://six.test:{port}", Answer) as client:
            assert client.call(Ask(1)) == Answer(2)


def test_ipv4_goes_first_for_a_name_that_has_both(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [(socket.AF_INET6, 1, 6, "", (ip, 0)) for ip in ("::1", "fe80::1%lo", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: entries)
    assert str(resolve_host("both.test")) == "127.0.0.1"


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(NotAvailable, match=r"'gone.test' has no address"):
        ControlClient("tcp://gone.test:1", Done)


@pytest.mark.parametrize(
    "url",
    [
        "ipc:///tmp/x",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:١",
        "tcp://::1:80",
        "tcp://[fe80::1%eth0]:80",
        "tcp://*:80",
        "tcp://0.0.0.0:80",
        "tcp://[::]:80",
        "tcp://[::ffff:0.0.0.0]:80",
        "tcp://a:1;127.0.0.1:2",
        "",
    ],
)
def test_addresses_that_cannot_be_dialled(url: str) -> None:
    with pytest.raises(InvalidUsage):
        ControlClient(url, Done)


def test_parse_url() -> None:
    at = parse_url("tcp://[::1]:80")
    assert (str(at.ip), at.port, at.is_ipv6, at.url) == ("::1", 80, True, "tcp://[::1]:80")
    assert parse_url("[::1]:80") == at
    assert parse_url("tcp://127.0.0.1:80") == Resolved(resolve_host("127.0.0.1"), 80)


@pytest.mark.parametrize("address", [5, None, b"tcp://127.0.0.1:80"])
def test_an_address_is_text(address: Any) -> None:
    with pytest.raises(InvalidUsage, match="is not an address; write tcp://host:port"):
        parse_url(address)


def test_an_old_libzmq_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sockets.require_libzmq((4, 3, 2))
    with pytest.raises(NotAvailable, match=r"libzmq 4.3.1 .* lowest accepted is 4.3.2"):
        sockets.require_libzmq((4, 3, 1))
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 2, 9))
    with pytest.raises(NotAvailable):
        serve()
    with pytest.raises(NotAvailable):
        ControlClient("tcp://127.0.0.1:1", (Done, AbortRequest))
