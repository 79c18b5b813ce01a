"""Errors of the library in the words of a command: options that it has, and no names of inside."""

import re
import socket
from collections.abc import Callable

import msgspec
import pytest

from kvxfer.cli.option_words import option_words
from kvxfer.control import ControlClient, ControlServer
from kvxfer.errors import ControlTimeout, InvalidUsage, KvxferError, NotAvailable


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    pass


HANDLERS = {Ask: lambda message: message}


def call_nobody() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with ControlClient(address, Ask, deadline_s=0.05) as client:
            client.call(Ask())


def bind_all() -> None:
    ControlServer({"ask": HANDLERS}, bind_host="0.0.0.0")


def bind_beyond_loopback() -> None:
    ControlServer({"ask": HANDLERS}, bind_host="192.0.2.7")


def advertise_loopback() -> None:
    ControlServer({"ask": HANDLERS}, bind_host="192.0.2.7", advertise_host="127.0.0.1")


def bind_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ControlServer({"ask": HANDLERS}, ports={"ask": taken.getsockname()[1]})


@pytest.mark.parametrize(
    ("fail", "kind", "text"),
    [
        (
            call_nobody,
            ControlTimeout,
            r"127\.0\.0\.1:\d+ gave no answer in 0\.05 s: no connection; nothing was sent; "
            r"start the other",
        ),
        (
            bind_all,
            InvalidUsage,
            r"--on 0\.0\.0\.0 is a wildcard, which no peer can dial; give --advertise-host, or "
            r"bind one address",
        ),
        (
            bind_beyond_loopback,
            InvalidUsage,
            r"--on 192\.0\.2\.7 lets other hosts in, and there is no key; give one \(--key\), bind "
            r"127\.0\.0\.1, or say --insecure if only trusted hosts reach this network",
        ),
        (
            advertise_loopback,
            InvalidUsage,
            r"--advertise-host '127\.0\.0\.1' is loopback while --on is 192\.0\.2\.7.*",
        ),
        (
            bind_a_taken_port,
            NotAvailable,
            r"port (\d+) for channel ask is in use: another socket listens on "
            r"tcp://127\.0\.0\.1:\1; choose another by --ports",
        ),
    ],
)
def test_an_error_names_options(
    fail: Callable[[], None], kind: type[KvxferError], text: str
) -> None:
    with (
        pytest.raises(kind) as info,
        option_words(bind="--on", ports="--ports", far="start the other"),
    ):
        fail()
    assert re.fullmatch(text, str(info.value)), str(info.value)


def test_another_error_is_raised_as_it_is() -> None:
    error = NotAvailable("memory is short", 12)
    with (
        pytest.raises(NotAvailable) as info,
        option_words(bind="--on", ports="--ports", far="start the other"),
    ):
        raise error
    assert info.value is error
