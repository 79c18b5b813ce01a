"""``kvxfer serve``, ``send`` and ``key``, the real programs, between processes and namespaces."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from two_hosts import HOSTS, slow_down, start_on_host, two_hosts

from kvxfer.cli.main import main
from kvxfer.cli.serve import parse_ports
from kvxfer.cli.spawned import Spawned
from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.transport import available_transports

__all__ = ["two_hosts"]  # a fixture

DEADLINE_S = 60.0
MODEL = """{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4,
"num_key_value_heads": 4, "head_dim": 16, "hidden_size": 64}"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(MODEL)
    return str(path)


def words(command: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvxfer", command, *arguments]


def run(command: str, *arguments: str, cwd: str = "/") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words(command, *arguments), capture_output=True, text=True, timeout=DEADLINE_S, cwd=cwd
    )


class Served:
    """A running ``kvxfer serve``."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        assert process.stdout is not None
        self.line = process.stdout.readline()
        if not self.line:
            pytest.fail(f"serve ended: {process.communicate(timeout=DEADLINE_S)[1]}")

    def end(self) -> tuple[int, list[str]]:
        """Close its input; returns its status and the lines of its requests."""
        out, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out.splitlines()


@contextmanager
def served(*arguments: str, on_host: int | None = None) -> Iterator[Served]:
    command = words("serve", *arguments)
    if on_host is None:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd="/"
        )
    else:
        process = start_on_host(on_host, *command)
    try:
        yield Served(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


# One command.


def test_send_alone_starts_its_receiver(model: str, tmp_path: Path) -> None:
    done = run(
        "send", "--model", "config.json", "--transport", "shm", "--tokens", "50", "--requests",
        "5", "--concurrency", "2", "--to-layout", "tp=2,order=hnd,block=32", "--json", "out.json",
        cwd=str(tmp_path),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert line.startswith("5 x ")
    assert "GB/s, latency p50" in line
    assert "shared segment" in line
    assert line.endswith("every byte checked by the receiver")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["checked"] is True
    assert result["num_requests"] == 5
    assert result["num_checked_bytes"] == 5 * result["request_bytes"]


def test_a_worker_that_ends_at_once_is_not_said_to_be_late(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (12, 4096))
    text = r"ended with status 2 before it served; it may open few files: RLIMIT_NOFILE is 12;"
    with Spawned(["--no-such-option"]) as worker, pytest.raises(NotAvailable, match=text):
        worker.read_addresses()
    assert "--no-such-option" in capfd.readouterr().err


# Two processes.


def test_serve_and_send(model: str, tmp_path: Path) -> None:
    common = ("--model", model, "--transport", "shm")
    with served(*common) as decode:
        addresses = json.loads(decode.line)
        assert set(addresses) == {"worker", "init", "alloc"}
        (tmp_path / "addresses").write_text(decode.line)
        worker = addresses["worker"].removeprefix("tcp://")
        for to in (decode.line, str(tmp_path / "addresses"), worker):
            done = run("send", *common, "--to", to, "--tokens", "20", "--requests", "2")
            assert (done.returncode, done.stderr) == (0, "")
            assert "every byte checked by the receiver" in done.stdout
        status, lines = decode.end()
    assert status == 0
    assert len(lines) == 9  # a warm-up each
    assert all(line.endswith("received, every byte checked") for line in lines)


def test_two_ranks_send_one_request(model: str) -> None:
    common = ("--model", model, "--transport", "shm")
    with served(*common, "--layout", "block=32") as decode:
        senders = [
            subprocess.Popen(
                words("send", *common, "--to", decode.line, "--layout", "tp=2", "--rank", rank,
                      "--name", "shared", "--tokens", "40", "--requests", "3"),
                stdout=subprocess.PIPE, text=True, cwd="/",
            )
            for rank in "01"
        ]  # fmt: skip
        for sender in senders:
            out, _ = sender.communicate(timeout=DEADLINE_S)
            assert sender.returncode == 0
            assert "every byte checked" in out
        status, lines = decode.end()
    assert (status, len(lines)) == (0, 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_by_a_signal(model: str, number: signal.Signals) -> None:
    with served("--model", model, "--transport", "shm") as decode:
        decode.process.send_signal(number)
        assert decode.process.wait(DEADLINE_S) == 0


def test_serve_ends_after_its_requests(model: str) -> None:
    common = ("--model", model, "--transport", "shm")
    with served(*common, "--requests", "2") as decode:
        done = run("send", *common, "--to", decode.line, "--tokens", "9", "--requests", "1")
        assert done.returncode == 0
        assert decode.process.wait(DEADLINE_S) == 0


def test_serve_does_not_end_where_nobody_holds_its_input(model: str) -> None:
    command = words("serve", "--model", model, "--transport", "shm", "--requests", "2")
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd="/"
    ) as process:
        decode = Served(process)
        done = run("send", "--model", model, "--to", decode.line, "--requests", "1")
        assert done.returncode == 0
        assert process.wait(DEADLINE_S) == 0


# Refusals.


def test_another_model_is_refused_by_name(model: str) -> None:
    with served("--model", model, "--transport", "shm") as decode:
        done = run("send", "--model", "llama-3.1-8b", "--tokens", "16", "--to", decode.line)
    assert done.returncode == 2
    assert "num_layers" in done.stderr


def test_another_transport_is_refused_by_name(model: str) -> None:
    with served("--model", model, "--transport", "shm") as decode:
        done = run("send", "--model", model, "--transport", "ucx", "--to", decode.line)
    assert done.returncode == 3
    assert "--transport ucx, and the receivers serve shm" in done.stderr


REFUSED = [
    (["serve", "--bind", "192.0.2.7"], 2, "--bind 192.0.2.7 lets other hosts in"),
    (["serve", "--bind", "0.0.0.0"], 2, "wildcard, which no peer can dial; give --advertise-host"),
    (["serve", "--layout", "tp=2"], 2, "give --rank 0 .. 1"),
    (["serve", "--layout", "tp=2", "--rank", "2"], 2, "--rank: '2'"),
    (["serve", "--blocks", "0"], 2, "--blocks: '0'"),
    (["serve", "--ports", "7000,7001"], 2, "--ports: '7000,7001'"),
    (["serve", "--key", "/no/such/key"], 2, "key file /no/such/key"),
    (["send", "--to", "nowhere"], 2, "neither the line that kvxfer serve prints"),
    (["send", "--to", "{}"], 2, "lacks alloc, init"),
    (["send", "--to", "{"], 2, "no JSON"),
    (["send", "--to", "127.0.0.1:9", "--to-layout", "tp=2"], 2, "leave --to"),
    (["send", "--tokens", "0"], 2, "--tokens: '0'"),
    (["send", "--tokens", "4m"], 2, "--tokens: '4m'"),
    (["send", "--transport", "shm", "--tokens", "4000000"], 3, "or a lower --concurrency"),
    (["key", ""], 2, "the path of the key file is empty; name a file"),
    (["send", "--layout", "tp=2", "--rank", "0"], 2, "start kvxfer serve"),
]


@pytest.mark.parametrize(("arguments", "status", "text"), REFUSED)
def test_wrong_usage(
    arguments: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    assert text in capsys.readouterr().err


def test_ports_are_one_or_three() -> None:
    assert parse_ports(None) == {}
    assert parse_ports("7600") == {"worker": 7600, "init": 7601, "alloc": 7602}
    assert parse_ports("7600,0,7700") == {"worker": 7600, "init": 0, "alloc": 7700}
    for text in ("65534", "0", "7600,7600,1", "a", "1,2,3,4"):
        with pytest.raises(InvalidUsage, match="--ports"):
            parse_ports(text)


def test_the_port_of_another_is_refused_by_its_option(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status = main(["serve", "--model", model, "--transport", "shm", "--ports", f"0,{port},0"])
    assert status == 3
    assert f"port {port} for channel init is in use" in (error := capsys.readouterr().err)
    assert error.endswith("; choose another by --ports\n")


def test_key_makes_a_key_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    assert main(["key", str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().strip() not in capsys.readouterr().out
    assert main(["key", str(path)]) == 2
    assert "exists; use it as it is, or name another" in capsys.readouterr().err


# Two hosts.


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes network namespaces")
@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize(
    ("transport", "path"),
    # Shared memory crosses network namespaces; the control plane has to take the network.
    [("shm", "shared segment"), ("ucx", "ucx tcp/kvxfer-vb"), ("nixl", "nixl UCX")],
)
def test_between_network_namespaces_a_key_lets_in(
    model: str, tmp_path: Path, transport: str, path: str
) -> None:
    found = available_transports()[transport]
    if not found.available:
        pytest.skip(found.reason)
    key = str(tmp_path / "key")
    assert main(["key", key]) == 0
    serve = ("--model", model, "--transport", transport, "--bind", "0.0.0.0", "--key", key)
    with served(*serve, "--advertise-host", HOSTS[0], "--ports", "7600", on_host=0) as decode:
        assert json.loads(decode.line)["init"] == f"tcp://{HOSTS[0]}:7601"
        send = words("send", "--model", model, "--to", f"{HOSTS[0]}:7600", "--tokens", "33")
        sender = start_on_host(1, *send, "--key", key)
        out, error = sender.communicate(timeout=DEADLINE_S)
        assert (sender.returncode, error) == (0, "")
        assert f"{path}, " in out
        assert "every byte checked by the receiver" in out
        stranger = start_on_host(1, *send)
        _, error = stranger.communicate(timeout=DEADLINE_S)
        assert stranger.returncode == 1
        assert "one side has a key and the other has none" in error
        status, lines = decode.end()
    assert (status, len(lines)) == (0, 11)


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes network namespaces")
@pytest.mark.usefixtures("two_hosts")
def test_between_network_namespaces_auto_takes_nixl_or_ucx_and_says_what_is_faster(
    model: str,
) -> None:
    """The two share a host after all: a process of the one is seen from the other."""
    found = available_transports()
    name = next((one for one in ("nixl", "ucx") if found[one].available), "")
    if not name:
        pytest.skip(f"nixl: {found['nixl'].reason}; ucx: {found['ucx'].reason}")
    with served("--model", model, "--bind", HOSTS[0], "--insecure", on_host=0) as decode:
        send = words("send", "--model", model, "--to", decode.line, "--insecure", "--requests", "1")
        sender = start_on_host(1, *send)
        out, error = sender.communicate(timeout=DEADLINE_S)
        assert sender.returncode == 0
        assert f", {name} " in out
        assert "every byte checked by the receiver" in out
        assert error.count("WARNING") == 1
        assert "is a process of this host; shm would be faster" in error
        strict = start_on_host(1, *send, "--strict")
        _, error = strict.communicate(timeout=DEADLINE_S)
        assert strict.returncode == 1
        assert "shm would be faster" in error
        assert "strict" in error
        assert decode.end()[0] == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes network namespaces")
@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize("transport", ["ucx", "nixl"])
def test_a_request_that_takes_longer_than_silence_may_is_sent(model: str, transport: str) -> None:
    found = available_transports()[transport]
    if not found.available:
        pytest.skip(found.reason)
    slow_down(1, mbit_per_s=8)
    common = ("--model", model, "--transport", transport, "--insecure")
    serve = (*common, "--bind", HOSTS[0], "--blocks", "2048")
    with served(*serve, on_host=0) as decode:
        # 8 MB at 1 MB/s; a receiver gives a sender up that is silent for 5 s.
        send = words("send", *common, "--to", decode.line, "--tokens", "16000", "--warmup", "0")
        # By itself NIXL's UCX would go from process to process.
        sender = start_on_host(1, "env", "UCX_TLS=tcp", *send, "--requests", "1")
        out, error = sender.communicate(timeout=DEADLINE_S)
        assert (sender.returncode, error) == (0, "")
        assert "every byte checked by the receiver" in out
        latency_ms = float(out.partition("latency p50 ")[2].split()[0])
        assert latency_ms > 5000, "the network was not slow"
        assert decode.end()[0] == 0
