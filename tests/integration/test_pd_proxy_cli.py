"""``kvxfer pd proxy``, the real program."""

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fake_engine import Engine, Wire
from free_ports import free_port
from listening import listening_hosts
from pd_proxies import run, until_true

from kvxfer.pd import client

DEADLINE_S = 60.0


def words(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvxfer", "pd", "proxy", *arguments]


@contextmanager
def started(*arguments: str) -> Iterator["tuple[subprocess.Popen[str], str]"]:
    """The program, and its URL."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words("--port", "0", "--proxy-port", str(free_port()), *arguments),
        stdout=pipe, stderr=pipe, text=True, cwd="/",
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate(timeout=DEADLINE_S)[1]
            yield process, json.loads(line)["url"]
        finally:
            process.kill()


def failed(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words(*arguments), capture_output=True, text=True, timeout=DEADLINE_S, cwd="/"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("connector", ["kvxfer", "nixl", "lmcache", "lmcache-together"])
def test_it_ends_when_it_is_told_to(number: int, connector: str) -> None:
    nobody = str(free_port())
    with started("--decoder-port", nobody, "--connector", connector) as (process, url):
        assert url.startswith("http://127.0.0.1:")
        process.send_signal(number)
        out, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, out) == (0, "")
        assert "Traceback" not in err
        assert err.count("do not answer yet") == 1
        assert f"decode engine 127.0.0.1:{nobody}" in err


def test_it_listens_on_loopback_alone() -> None:
    with started("--connector", "lmcache") as (process, _):
        assert listening_hosts(process.pid) == {"127.0.0.1"}


def test_a_request_passes_through_the_program() -> None:
    async def test() -> None:
        wire = Wire()
        async with Engine(wire).running() as prefill, Engine(wire).running() as decode:
            ports = ("--prefiller-port", str(prefill.port), "--decoder-port", str(decode.port))
            with started(*ports) as (_, url):

                def ask() -> object:
                    body = {"prompt": [1, 2, 3], "max_tokens": 4}
                    return client.post_all(url, "/v1/completions", [body], DEADLINE_S)[0]["usage"]

                async def is_well() -> bool:
                    return await asyncio.to_thread(health, url) == 200

                await until_true(is_well)
                usage = {"prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4}
                assert await asyncio.to_thread(ask) == usage
                assert len(prefill.seen) == len(decode.seen) == 1

    run(test())


def health(url: str) -> int:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("option", ["--port", "--proxy-port"])
def test_a_port_in_use_is_said(option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        other = ["--proxy-port", str(free_port())] if option == "--port" else ["--port", "0"]
        done = failed("--connector", "lmcache", *other, option, port)
    assert done.returncode == 3
    assert port in done.stderr
    assert option in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--decoder-init-port", "7300,7301"], "2 init ports and 1 alloc ports"),
        (["--decoder-init-port", "7400"], "port 7400 of 127.0.0.1 stands for 2 things"),
        (["--connector", "pigeon"], "invalid choice: 'pigeon'"),
        (["--num-decoders", "2", "--decoder-host", "a,b,c"], "3 hosts"),
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], complaint: str) -> None:
    done = failed(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr


def test_without_aiohttp_it_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import importlib.util as u, sys\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'aiohttp' else find(name, *rest)\n"
        "from kvxfer.cli.main import main\nsys.exit(main(['pd', 'proxy']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 3
    assert "pip install aiohttp" in done.stderr


def test_help_needs_no_aiohttp(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['aiohttp'] = None\n"
        "from kvxfer.cli.main import main\nmain(['pd', 'proxy', '--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0
    for flag in ("--prefiller-host", "--decoder-alloc-port", "--num-decoders", "--proxy-port"):
        assert flag in done.stdout
