"""Bodies and connections of no good client: an error in OpenAI's shape, and nothing else."""

import asyncio
import json
import logging
import socket
import struct
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from pd_proxies import CHAT, COMPLETIONS, LIMITS, Setup, run, serving, until, until_true

from kvxfer.pd.proxy import http_log

GOOD = {"prompt": [1, 2, 3], "max_tokens": 2}
HEADER_S = 0.5
LINGERS_NOT = struct.pack("ii", 1, 0)  # a close is a reset
QUICK_HEADER = replace(LIMITS, header_s=HEADER_S)

BAD_BODIES = {
    "empty": b"",
    "no_json": b"{",
    "two_objects": b"{}{}",
    "list": b"[1]",
    "string": b'"x"',
    "number": b"1",
    "null": b"null",
    "not_utf8_key": b'{"\xff": 1}',
    "nan": b'{"prompt": [1, 2], "temperature": NaN}',
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep_objects": b'{"prompt": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    "hidden_encoder_params": b'{"prompt": [1, 2], "vllm_xargs": {"ec_transfer_params": "x"}}',
    "hidden_params": b'{"prompt": [1, 2], "vllm_xargs": {"kv_transfer\\u005fparams": "x"}}',
    "xargs_no_object": b'{"prompt": [1, 2], "vllm_xargs": [1]}',
    "gzip": b"\x1f\x8b\x08\x00" + b"\x00" * 64,
}


async def still_serves(setup: Setup) -> None:
    assert (await setup.ask(GOOD)).status == 200
    await setup.settled()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_that_is_no_object_is_status_400(name: str, path: str) -> None:
    async def test() -> None:
        async with serving() as setup:
            reply = await setup.ask(BAD_BODIES[name], path)
            assert reply.status == 400
            assert reply.json["error"]["type"] == "BadRequestError"
            assert reply.headers["Content-Type"] == "application/json"
            assert not setup.prefill[0].seen
            assert not setup.decode[0].seen
            await still_serves(setup)

    run(test())


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": None},
        {"prompt": {}},
        {"prompt": []},
        {"prompt": [[[1]]]},
        {"prompt": [1, 2], "n": -1},
        {"prompt": [1, 2], "n": [9] * 100},
        {"prompt": [1, 2], "n": 1e300},
        {"prompt": [1, 2], "max_tokens": 2**200},
        {"prompt": [1, 2], "max_tokens": "9"},
        {"prompt": [1, 2], "stream": "yes"},
        {"prompt": [1, 2], "echo": {"a": 1}},
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)
def test_a_value_that_the_proxy_cannot_read_is_the_engine_s_to_refuse(fields: object) -> None:
    async def test() -> None:
        async with serving() as setup:
            for engine in (*setup.prefill, *setup.decode):
                engine.refusal = (422, b"mine")
            for connector_path in (COMPLETIONS, CHAT):
                reply = await setup.ask(fields, connector_path)
                assert (reply.status, reply.body) == (422, b"mine")
            await setup.settled()

    run(test())


@pytest.mark.parametrize("connector", ["kvxfer", "nixl", "lmcache", "lmcache-together"])
def test_every_connector_survives_strange_values(connector: str) -> None:
    strange = [None, True, -1, 0, 1.5, "x", [], {}, [[]], {"a": 1}, 2**70]
    names = ["prompt", "n", "max_tokens", "min_tokens", "stop", "stream", "stream_options", "seed",
             "temperature", "model", "kv_transfer_params", "vllm_xargs", "logprobs"]  # fmt: skip

    async def test() -> None:
        async with serving(connector=connector) as setup:
            for engine in (*setup.prefill, *setup.decode):
                engine.refusal = (422, b"mine")
            for name in names:
                for value in strange:
                    reply = await setup.ask({**GOOD, name: value})
                    assert reply.status in (400, 422), (name, value, reply)
            assert await setup.metric("kvxfer_proxy_requests_total", status="500") == 0
            await setup.settled()

    run(test())


def test_a_client_cannot_send_kv_anywhere() -> None:
    async def test() -> None:
        async with serving() as setup:
            there = {"kvxfer": {"role": "send", "receivers": [{"init": "tcp://10.0.0.9:1"}]}}
            params = {name: there for name in ("kv_transfer_params", "ec_transfer_params")}
            await setup.ask({**GOOD, **params})
            await setup.ask({**GOOD, **params, "prompt": [1]})  # by one engine alone
            assert len(setup.decode[0].seen) == 2
            for seen in (*setup.prefill[0].seen, *setup.decode[0].seen):
                assert b"10.0.0.9" not in seen.raw

    run(test())


def test_a_body_above_the_limit_is_status_413() -> None:
    async def test() -> None:
        async with serving(limits=replace(LIMITS, body_bytes=10_000)) as setup:
            large = {**GOOD, "user": "x" * 20_000}
            for data in (json.dumps(large).encode(), chunks(large)):
                async with setup.session.post(setup.url + COMPLETIONS, data=data) as response:
                    assert response.status == 413
                    assert "10000 bytes" in (await response.json())["error"]["message"]
            await still_serves(setup)

    run(test())


async def chunks(body: object):  # type: ignore[no-untyped-def]
    """A body whose length is not said beforehand."""
    data = json.dumps(body).encode()
    for start in range(0, len(data), 1000):
        yield data[start : start + 1000]


def connected(setup: Setup) -> socket.socket:
    address = urlsplit(setup.url)
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=60)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le"])
def test_a_connection_that_never_asks_is_closed(sent: bytes) -> None:
    async def test() -> None:
        async with serving(limits=QUICK_HEADER) as setup:
            with connected(setup) as client:
                assert await asyncio.to_thread(send_and_read, client, sent) == b""
            await still_serves(setup)

    run(test())


def test_a_connection_that_has_asked_may_rest() -> None:
    async def test() -> None:
        async with serving(limits=QUICK_HEADER) as setup:
            with connected(setup) as client:
                ask = b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n"
                for _ in range(2):
                    client.sendall(ask)
                    answer = await asyncio.to_thread(client.recv, 1 << 16)
                    assert answer.startswith(b"HTTP/1.1 200")
                    await asyncio.sleep(2 * HEADER_S)

    run(test())


def test_a_body_that_never_comes_is_status_408() -> None:
    async def test() -> None:
        async with serving(limits=replace(LIMITS, body_s=0.5)) as setup:
            with connected(setup) as client:
                client.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
                )
                answer = await asyncio.to_thread(client.recv, 4096)
            assert answer.startswith(b"HTTP/1.1 408")
            await still_serves(setup)

    run(test())


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_a_client_that_leaves_amid_its_body_is_no_error(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with serving() as setup:
            half = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode()
            for is_reset in (False, True):
                gone = await setup.metric("kvxfer_proxy_clients_gone_total")
                with connected(setup) as client:
                    client.sendall(half)
                    if path == COMPLETIONS:
                        await until_true(lambda: is_asking(setup))
                    if is_reset:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGERS_NOT)
                await until_true(lambda gone=gone: have_left(setup, gone + 1))  # type: ignore[misc]
            assert await setup.metric("kvxfer_proxy_requests_total", status="500") == 0
            await still_serves(setup)

    run(test())
    assert [one for one in caplog.records if one.exc_info or one.levelno > logging.WARNING] == []


async def is_asking(setup: Setup) -> bool:
    return await setup.metric("kvxfer_proxy_requests_running") == 1


async def have_left(setup: Setup, count: float) -> bool:
    return await setup.metric("kvxfer_proxy_clients_gone_total") == count


def test_a_client_that_leaves_before_a_small_answer_is_counted() -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.decode[0].tokenize_held = asyncio.Event()
            asking = asyncio.ensure_future(setup.ask({"prompt": "x"}, "/tokenize"))
            await until(lambda: setup.decode[0].seen)
            asking.cancel()
            await until_true(lambda: have_left(setup, 1))

    run(test())


def test_a_head_has_no_body_and_says_how_long_it_would_be() -> None:
    async def test() -> None:
        async with serving() as setup:
            with connected(setup) as client:
                for path in (b"/v1/models", b"/health", b"/nothing"):
                    client.sendall(b"HEAD " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
                client.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                answers = (await asyncio.to_thread(read_all, client)).split(b"\r\n\r\n")
            heads, last = answers[:-1], answers[-1]
            statuses = [head.partition(b"\r\n")[0] for head in heads]
            assert [status[:12] for status in statuses] == [
                b"HTTP/1.1 200", b"HTTP/1.1 200", b"HTTP/1.1 404", b"HTTP/1.1 200",
            ]  # fmt: skip
            model = (await setup.get("/v1/models")).body
            assert f"Content-Length: {len(model)}".encode() in heads[0]
            assert json.loads(last)["status"] == "ok"

    run(test())


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/tokenize", COMPLETIONS])
@pytest.mark.parametrize("method", ["DELETE", "PUT", "PATCH"])
def test_a_method_that_is_none_of_the_api_reaches_no_engine(method: str, path: str) -> None:
    async def test() -> None:
        async with (
            serving() as setup,
            setup.session.request(method, setup.url + path) as response,
        ):
            assert response.status == 405
            assert "POST" in response.headers["Allow"]
            assert (await response.json())["error"]["type"] == "MethodNotAllowedError"
            assert not setup.decode[0].seen

    run(test())


def test_what_a_small_request_asks_for_behind_its_path_reaches_the_engine() -> None:
    async def test() -> None:
        async with serving() as setup:
            assert (await setup.get("/v1/models?a=b%20c&d=%2F")).status == 200
            assert setup.decode[0].queries == {"a": "b c", "d": "/"}

    run(test())


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff" * 500,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 50_000 + b"\r\n",
    ],
    ids=["noise", "version", "negative_length", "two_lengths", "long_header", "many_headers"],
)
def test_what_is_no_http_ends_the_connection(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving() as setup:
            with connected(setup) as client:
                answer = await asyncio.to_thread(send_and_read, client, data)
            assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4", b"HTTP/9.9 4")) or not answer
            await still_serves(setup)

    run(test())
    assert [one for one in caplog.records if one.exc_info or one.levelno > logging.WARNING] == []


def test_other_errors_keep_their_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("a fault of ours")
    except ValueError:
        http_log.log.exception("Error handling request from %s", "x")
    assert "a fault of ours" in caplog.text


def send_and_read(client: socket.socket, data: bytes) -> bytes:
    try:
        client.sendall(data)
        return client.recv(4096)
    except ConnectionError:
        return b""


def test_a_client_of_http_1_0_reads_a_stream_to_its_end() -> None:
    async def test() -> None:
        async with serving() as setup:
            body = json.dumps({**GOOD, "stream": True}).encode()
            head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            with connected(setup) as client:
                client.sendall(head + body)
                answer = await asyncio.to_thread(read_all, client)
            assert b"Transfer-Encoding" not in answer
            assert answer.endswith(b"data: [DONE]\n\n")

    run(test())


def read_all(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(4096), b""))


def test_requests_in_one_write_are_answered_in_order() -> None:
    async def test() -> None:
        async with serving() as setup:
            request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
            last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            with connected(setup) as client:
                client.sendall(request * 3 + last)
                answer = await asyncio.to_thread(read_all, client)
            assert answer.count(b"HTTP/1.1 200") == 4

    run(test())


def test_many_clients_at_once_all_get_their_own_answer() -> None:
    async def one(setup: Setup, number: int) -> None:
        body = {"prompt": [number % 120 + 1] * 9, "max_tokens": 5, "stream": bool(number % 2)}
        reply = await setup.ask(body, headers={"X-Request-Id": str(number)})
        first = reply.events[0] if number % 2 else reply.json
        assert first["id"] == f"cmpl-{number}"

    async def test() -> None:
        async with serving(2, 2) as setup:
            await asyncio.gather(*(one(setup, number) for number in range(200)))
            await setup.settled()
            await until_true(lambda: have_all_ended(setup, 200))

    run(test())


async def have_all_ended(setup: Setup, count: int) -> bool:
    return await setup.metric("kvxfer_proxy_requests_total", status="200") == count
