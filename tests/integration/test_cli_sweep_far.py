"""``kvxfer sweep --listen`` and ``--peer``: the two sides started apart, and on two hosts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from two_hosts import HOSTS, start_on_host, two_hosts
from waiting import eventually

from kvxfer.cli.main import main
from kvxfer.cli.sweep_far import parse_place
from kvxfer.control import SharedKey
from kvxfer.errors import ControlTimeout, InvalidUsage, NotAvailable, PeerLost
from kvxfer.layout import TPLayout
from kvxfer.session.layouts import layout_spec, rank_spec
from kvxfer.sweep import messages
from kvxfer.sweep.binding import LOOPBACK
from kvxfer.sweep.cases import raw_layout
from kvxfer.sweep.far_agent import FarAgent, Listener
from kvxfer.transport import available_transports

__all__ = ["two_hosts"]  # a fixture

DEADLINE_S = 60.0
TINY = ("--tokens", "16", "--iters", "2", "--warmup", "0", "--threads", "2")
LAYOUT = raw_layout(1024, 2)


def words(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvxfer", "sweep", *arguments]


@contextmanager
def listening(*arguments: str, on_host: int | None = None) -> Iterator[str]:
    """A side that listens; its address."""
    command = words("--listen", *arguments)
    if on_host is None:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )
    else:
        process = start_on_host(on_host, *command)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate(timeout=DEADLINE_S)  # closes its input
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def rows_of(path: Path) -> list[dict[str, object]]:
    report = json.loads(path.read_text())
    assert report["skipped"] == []
    assert report["environment"]["peer cpus"]
    rows: list[dict[str, object]] = report["results"]
    assert all(row["verified"] for row in rows)
    return rows


def test_two_sides_that_were_started_apart_sweep_twice(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with listening("127.0.0.1:0") as address:
        for _ in range(2):
            arguments = ["--peer", address, *TINY, "--op", "put,get", "--json", str(path)]
            assert main(["sweep", *arguments]) == 0
            assert [(row["transport"], row["op"], row["memory"]) for row in rows_of(path)] == [
                ("shm", op, memory) for memory in ("shared", "private") for op in ("put", "get")
            ]


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes network namespaces")
@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize("transport", ["ucx", "nixl"])
def test_two_hosts_sweep_over_their_network(tmp_path: Path, transport: str) -> None:
    found = available_transports()[transport]
    if not found.available:
        pytest.skip(f"{transport}: {found.reason}")
    key, path = str(tmp_path / "key"), tmp_path / "report.json"
    SharedKey.create(key)
    with listening(f"{HOSTS[0]}:7500", "--key", key, on_host=0) as address:
        assert address == f"tcp://{HOSTS[0]}:7500"
        common = ("--peer", f"{HOSTS[0]}:7500", "--transport", transport, *TINY)
        near = start_on_host(
            1, *words(*common, "--op", "put,get", "--key", key, "--json", str(path))
        )
        _, error = near.communicate(timeout=DEADLINE_S)
        assert (near.returncode, error) == (0, "")
        stranger = start_on_host(1, *words(*common, "--insecure"))
        _, error = stranger.communicate(timeout=DEADLINE_S)
        assert stranger.returncode == 1
        assert "one side has a key and the other has none" in error
    rows = rows_of(path)
    assert [row["op"] for row in rows] == ["put", "get"]
    if transport == "ucx":
        assert {row["actual_path"] for row in rows} == {"ucx tcp/kvxfer-vb"}


REFUSED = [
    (["--listen", "nowhere"], 2, "--listen: 'nowhere'"),
    (["--listen", "127.0.0.1:0", "--peer", "127.0.0.1:9"], 2, "leave --peer"),
    (["--listen", "192.0.2.7:7500"], 2, "--listen 192.0.2.7 lets other hosts in"),
    (["--listen", "0.0.0.0:7500"], 2, "--listen 0.0.0.0 is a wildcard"),
    (["--listen", "127.0.0.1:0", "--key", "/no/such/key"], 2, "key file /no/such/key"),
    (["--key", "/no/such/key"], 2, "--key is of sweeps between two hosts"),
    (["--peer", "127.0.0.1", *TINY], 2, "is not an address"),
    (["--peer", "127.0.0.1:9", "--transport", "loopback", *TINY], 2, "does not reach it"),
    (["--peer", "127.0.0.1:9", "--transport", "shm", "--tp", "2:1"], 2, "leave --tp"),
    (["--peer", "127.0.0.1:9", "--transport", "shm", "--peers", "memcpy"], 2, "or --peer"),
]


@pytest.mark.parametrize(("arguments", "status", "text"), REFUSED)
def test_wrong_usage(
    arguments: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *arguments]) == status
    assert text in capsys.readouterr().err


def test_places_to_listen_at() -> None:
    assert parse_place("10.0.0.1:7500") == ("10.0.0.1", 7500)
    assert parse_place("tcp://[::1]:0") == ("[::1]", 0)
    for text in (":1", "::1:7500", "a:", "a:65536", "a:-1", "a:1٢"):
        with pytest.raises(InvalidUsage, match="write HOST:PORT"):
            parse_place(text)


# The agent that listens.


def prepare(num_blocks: int = 4) -> messages.Prepare:
    return messages.Prepare(
        layout=layout_spec(LAYOUT),
        rank=rank_spec(TPLayout()),
        num_blocks=num_blocks,
        memory="shared",
        device=-1,
        transport="shm",
        num_threads=1,
    )


def test_one_sweep_at_a_time() -> None:
    with Listener(0, LOOPBACK) as listener:
        with FarAgent(listener.address, None) as first:
            first.call(prepare())
            with pytest.raises(NotAvailable, match="another sweep is under way"):
                FarAgent(listener.address, None)
            first.call(messages.Fill(seed=1))
        with FarAgent(listener.address, None) as second:
            with pytest.raises(InvalidUsage, match="nothing is prepared"):
                second.call(messages.Fill(seed=1))
            second.call(prepare())


def test_a_sweep_that_dies_frees_the_far_side() -> None:
    with Listener(0, LOOPBACK) as listener:
        first = FarAgent(listener.address, None)
        first.call(prepare())
        first._agent.close()  # without a word, as the kernel does for a process that was killed

        def is_taken_anew() -> bool:
            with suppress(NotAvailable), FarAgent(listener.address, None) as second:
                with pytest.raises(InvalidUsage, match="nothing is prepared"):
                    second.call(messages.Fill(seed=1))
                return True
            return False

        eventually(is_taken_anew, "the far side waits for a sweep that has gone")


def test_a_pool_that_the_host_does_not_have_is_refused() -> None:
    with Listener(0, LOOPBACK) as listener, FarAgent(listener.address, None) as agent:
        with pytest.raises(NotAvailable, match="of memory free"):
            agent.call(prepare(num_blocks=1 << 50))
        agent.call(prepare())


def test_a_side_that_ends_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.control.client._RETURN_S", 0.2)
    with Listener(0, LOOPBACK) as listener, FarAgent(listener.address, None) as agent:
        listener.close()
        with pytest.raises(PeerLost):
            agent.call(messages.Fill(seed=1))
        with pytest.raises((PeerLost, ControlTimeout), match="Release"):
            agent.call(messages.Release())


def test_a_clean_up_waits_for_a_silent_side_not_as_long_as_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Listener(0, LOOPBACK) as listener, FarAgent(listener.address, None) as agent:
        limits: list[tuple[str, float | None]] = []
        silent = ControlTimeout("nothing came")

        def call(message: object, *, deadline_s: float | None = None) -> None:
            limits.append((type(message).__name__, deadline_s))
            raise silent

        monkeypatch.setattr(agent._agent, "call", call)
        for message in (messages.Release(), messages.Fill(seed=1), messages.Release()):
            with pytest.raises(ControlTimeout):
                agent.call(message)
        agent.close()
    assert limits == [("Release", 3.0), ("Fill", None), ("Release", 0.2), ("Leave", 0.2)]


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with Listener(0, LOOPBACK) as listener:
        versions = iter(["0.1.0", "0.0.9"])  # it is asked for there, then here
        monkeypatch.setattr(
            "kvxfer.sweep.far_agent.environment", lambda: {"kvxfer": next(versions)}
        )
        with pytest.raises(NotAvailable, match=r"runs kvxfer 0\.1\.0, this side 0\.0\.9"):
            FarAgent(listener.address, None)
