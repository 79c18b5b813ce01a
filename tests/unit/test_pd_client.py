"""Single requests, to servers that misbehave."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

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


@contextmanager
def answering(reply: bytes | None) -> Iterator[str]:
    """A server that gives one reply, then closes; None = it never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []

        def serve() -> None:
            peer, _ = listener.accept()
            held.append(peer)
            peer.settimeout(10.0)
            while not peer.recv(65536):
                pass
            if reply is not None:
                peer.sendall(reply)
                peer.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10.0)
        for peer in held:
            peer.close()


def reply(body: str, status: str = "200 OK", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n{body}".encode()


def test_a_stream_gives_text_and_a_gap_between_chunks_with_choices() -> None:
    with answering(reply(EVENTS)) as url:
        answer = client.complete(url, {"prompt": "x"}, 10.0)
    assert answer.text == "ab"
    assert len(answer.gaps_s) == 2
    assert answer.ttft_s > 0
    assert (answer.num_messages, answer.num_tokens) == (3, 3)


@pytest.mark.parametrize("usage", ["null", "3", "{}", '{"completion_tokens": "x"}'])
def test_a_stream_without_a_count_has_none(usage: str) -> None:
    events = f'data: {{"choices": [{{"text": "a"}}], "usage": {usage}}}\n\ndata: [DONE]\n\n'
    with answering(reply(events)) as url:
        assert client.complete(url, {}, 10.0).num_tokens is None


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (reply("no", "503 Busy"), TransferFailed),
        (reply("data: {\n\n"), TransferFailed),
        (reply('data: {"error": {"message": "no"}}\n\n'), TransferFailed),
        (reply("data: [DONE]\n\n"), TransferFailed),  # no token
        (reply('data: {"choices": [{"text": "a"}]}\n\n'), TransferFailed),  # no end
        (b"nonsense\r\n\r\n", NotAvailable),
        (b"", NotAvailable),
    ],
)
def test_what_is_no_answer_is_one_of_our_errors(sent: bytes, kind: type[Exception]) -> None:
    with answering(sent) as url, pytest.raises(kind):
        client.complete(url, {"prompt": "x"}, 10.0)


def test_an_answer_cut_short_is_seen() -> None:
    with answering(reply("{}", length=100)) as url, pytest.raises(NotAvailable):
        client.post_all(url, "/x", [{}], 10.0)


def test_all_requests_are_sent_before_an_answer_is_awaited() -> None:
    def serve() -> None:
        peers = [listener.accept()[0] for _ in range(3)]
        for number, peer in enumerate(peers):
            while not peer.recv(65536).endswith(b"}"):
                pass
            peer.sendall(reply(f'{{"number": {number}}}'))
            peer.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        answers = client.post_all(url, "/x", [{"a": 1}] * 3, 10.0)
        thread.join(10.0)
    assert [one["number"] for one in answers] == [0, 1, 2]


@pytest.mark.parametrize("body", ["[]", "{", "[" * 100_000])
def test_an_answer_that_is_no_object_is_refused(body: str) -> None:
    with answering(reply(body)) as url, pytest.raises(TransferFailed):
        client.post_all(url, "/x", [{}], 10.0)


def test_nobody_is_not_healthy_and_neither_is_who_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert not client.is_healthy(url, 5.0)
    with answering(None) as url:
        assert not client.is_healthy(url, 0.2)
    with answering(reply("")) as url:
        assert client.is_healthy(url, 10.0)


@pytest.mark.parametrize(
    "url",
    [
        *["", "h:1", "https://h:1", "http://", "http://h:99999", "http://h:abc", "http://[::1"],
        f"http://{'h' * 64}:1",  # longer than a label of a name may be
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidUsage, match="is no http://HOST:PORT"):
        client.get(url, "/", 1.0)
