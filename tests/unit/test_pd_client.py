"""Single requests, to servers that misbehave."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from waiting import GUARD_S

from kvxfer.errors import InvalidUsage, NotAvailable, TransferFailed
from kvxfer.pd import client

EVENTS = (
    ": a comment\n\n"
    'data: {"choices": [{"text": "a"}]}\n\n'
    'data: {"choices": [{"text": null}]}\n\n'
    'data: {"choices": [{"text": "b"}]}\n\n'
    'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
    "data: [DONE]\n\n"
)


def read_request(peer: socket.socket) -> None:
    """All of it: what is left unread when a connection closes takes its answer along."""
    with peer.makefile("rb") as file:
        length = 0
        while (line := file.readline()).strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        file.read(length)


@contextmanager
def answering(reply: bytes | None) -> Iterator[str]:
    """A server that gives one reply, then closes; None = it never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []

        def serve() -> None:
            peer, _ = listener.accept()
            held.append(peer)
            peer.settimeout(GUARD_S)
            read_request(peer)
            if reply is not None:
                peer.sendall(reply)
                peer.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(GUARD_S)
        for peer in held:
            peer.close()


def reply(body: str, status: str = "200 OK", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n{body}".encode()


def test_a_stream_gives_text_and_a_gap_between_chunks_with_choices() -> None:
    with answering(reply(EVENTS)) as url:
        answer = client.complete(url, {"prompt": "x"}, GUARD_S)
    assert answer.text == "ab"
    assert len(answer.gaps_s) == 2
    assert answer.ttft_s > 0
    assert (answer.num_messages, answer.num_tokens) == (3, 3)


def test_events_may_lack_a_space_and_an_error() -> None:
    events = 'data:{"choices": [{"text": "a"}], "error": null}\r\n\r\ndata:[DONE]\r\n\r\n'
    with answering(reply(events)) as url:
        assert client.complete(url, {}, GUARD_S).text == "a"


@pytest.mark.parametrize("usage", ["null", "3", "{}", '{"completion_tokens": "x"}'])
def test_a_stream_without_a_count_has_none(usage: str) -> None:
    events = f'data: {{"choices": [{{"text": "a"}}], "usage": {usage}}}\n\ndata: [DONE]\n\n'
    with answering(reply(events)) as url:
        assert client.complete(url, {}, GUARD_S).num_tokens is None


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (reply("no", "503 Busy"), TransferFailed),
        (reply("data: {\n\n"), TransferFailed),
        (reply('data: {"error": {"message": "no"}}\n\n'), TransferFailed),
        (reply("data: [DONE]\n\n"), TransferFailed),  # no token
        (reply('data: {"choices": [{"text": "a"}]}\n\n'), TransferFailed),  # no end
        (reply('data: {"choices": {"a": 1}}\n\n'), TransferFailed),
        (reply('data: {"choices": ["x"]}\n\n'), TransferFailed),
        (reply('data: {"choices": 5}\n\n'), TransferFailed),
        (reply("data: " + "[" * 200_000 + "\n\n"), TransferFailed),
        (reply('data: {"usage": ' + "9" * 5000 + "}\n\n"), TransferFailed),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"text": "\xff"}]}\n\n', TransferFailed),
        (b"nonsense\r\n\r\n", NotAvailable),
        (b"", NotAvailable),
    ],
)
def test_what_is_no_answer_is_one_of_our_errors(sent: bytes, kind: type[Exception]) -> None:
    with answering(sent) as url, pytest.raises(kind):
        client.complete(url, {"prompt": "x"}, GUARD_S)


def test_an_answer_cut_short_is_seen() -> None:
    with answering(reply("{}", length=100)) as url, pytest.raises(NotAvailable):
        client.post_all(url, "/x", [{}], GUARD_S)


def test_all_requests_are_sent_before_an_answer_is_awaited() -> None:
    def serve() -> None:
        peers = [listener.accept()[0] for _ in range(3)]
        for number, peer in enumerate(peers):
            read_request(peer)
            peer.sendall(reply(f'{{"number": {number}}}'))
            peer.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        answers = client.post_all(url, "/x", [{"a": 1}] * 3, GUARD_S)
        thread.join(GUARD_S)
    assert [one["number"] for one in answers] == [0, 1, 2]


@pytest.mark.parametrize("body", ["[]", "{", "[" * 100_000])
def test_an_answer_that_is_no_object_is_refused(body: str) -> None:
    with answering(reply(body)) as url, pytest.raises(TransferFailed):
        client.post_all(url, "/x", [{}], GUARD_S)


def test_nobody_is_not_healthy_and_neither_is_who_never_answers() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        assert not client.is_healthy(f"http://127.0.0.1:{taken.getsockname()[1]}", 5.0)
    with answering(None) as url:
        assert not client.is_healthy(url, 0.2)
    with answering(reply("")) as url:
        assert client.is_healthy(url, GUARD_S)


@pytest.mark.parametrize(
    "url",
    [
        *["", "h:1", "https://h:1", "http://", "http://h:99999", "http://h:abc", "http://[::1"],
        *[f"http://{'h' * 64}:1", "http://a..b:1"],  # labels of names have 1 to 63 letters
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidUsage, match="is no http://HOST:PORT"):
        client.get(url, "/", 1.0)
