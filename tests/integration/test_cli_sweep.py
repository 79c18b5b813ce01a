"""``kvxfer sweep``, the real program: what it prints, writes and returns, and how it ends."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer.cli.main import main
from kvxfer.transport import available_transports

DEADLINE_S = 60.0
# Far above what the end of a sweep takes; the tests ask for life or death, not for speed.
GONE_S = 5.0
TINY = ("--tokens", "16", "--iters", "2", "--warmup", "0", "--threads", "2")
SHM = ("--transport", "shm")
# The first case takes a moment and is logged; the second would go on for a good while.
LONG = ("-v", "sweep", *SHM, "--memory", "shared", "--tokens", "16,1024", "--iters", "500")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvxfer", *arguments]


def sweep(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command("sweep", *arguments),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd="/",  # not the source tree, whose kvxfer has no core
        env={**os.environ, "NO_COLOR": "1"},
    )


# Exit 0: the table, and the files.


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory,
) -> "tuple[Path, subprocess.CompletedProcess[str]]":
    """One small sweep over all of a CPU's paths, in a pipe."""
    folder = tmp_path_factory.mktemp("out")
    files = [f"--{kind}={folder / kind}" for kind in ("json", "csv", "markdown")]
    return folder, sweep(*SHM, *TINY, "--op", "put,get", *files)


def test_the_table_is_on_stdout_and_stderr_is_silent(done: Any) -> None:
    _, result = done
    assert result.returncode == 0
    assert result.stderr == ""
    assert "every byte checked on the receiver" in result.stdout
    for row in ("shm put, shared", "shm put, private", "shm get, shared", "shm get, private"):
        assert row in result.stdout
    for path in ("shared segment, memcpy", "cross-memory attach, process_vm_writev"):
        assert f"path: {path}" in result.stdout
    assert "\x1b" not in result.stdout  # no colours and no bar in a pipe


def test_the_json_file(done: Any) -> None:
    folder, _ = done
    document = json.loads((folder / "json").read_text())
    assert document["schema"] == "kvxfer.sweep/1"
    assert [(row["memory"], row["op"]) for row in document["results"]] == [
        ("shared", "put"),
        ("shared", "get"),
        ("private", "put"),
        ("private", "get"),
    ]
    assert all(row["verified"] and row["iters"] == 2 for row in document["results"])
    assert document["skipped"] == []
    assert document["interrupted"] is False


def test_the_csv_file_has_the_json_rows(done: Any) -> None:
    folder, _ = done
    document = json.loads((folder / "json").read_text())
    with (folder / "csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == len(document["results"])
    for row, result in zip(rows, document["results"], strict=True):
        assert row["actual_path"] == result["actual_path"]
        assert float(row["gb_per_s_p50"]) == result["gb_per_s"]["p50"]
        assert float(row["latency_us_p99"]) == result["latency_us"]["p99"]
        assert row["notes"] == "; ".join(result["notes"])
        assert row["compute"] == ""
        flat = {name.removesuffix("_p50") for name in row}
        assert set(result) - {"gb_per_s", "latency_us"} <= flat


def test_the_markdown_file_is_the_table(done: Any) -> None:
    folder, _ = done
    lines = (folder / "markdown").read_text().splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    assert table[0][:3] == ["transport", "model", "tokens"]
    assert len({len(row) for row in table}) == 1
    assert [row[0] for row in table[2:]] == [
        "shm put, shared",
        "shm get, shared",
        "shm put, private",
        "shm get, private",
    ]
    assert any(line.startswith("- kvxfer: ") for line in lines)


def test_verbose_logs_go_to_stderr() -> None:
    result = subprocess.run(
        command("-v", "sweep", *TINY, "--transport", "loopback", "--memory", "shared"),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd="/",  # not the source tree, whose kvxfer has no core
    )
    assert result.returncode == 0
    lines = result.stderr.splitlines()
    assert lines
    assert all(line.startswith("kvxfer: INFO: loopback/shared put") for line in lines)
    assert "INFO" not in result.stdout


# Exit 1: a check failed. In this process, so that the fault can be planted.


def test_wrong_bytes_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("kvxfer.transport.loopback.copy_mapped", lambda *_: "memcpy")
    file = tmp_path / "out.json"
    arguments = ["sweep", "--transport", "loopback", "--memory", "shared", *TINY]
    assert main([*arguments, "--json", str(file)]) == 1
    shown = capsys.readouterr().out
    assert "FAILED: loopback/shared put" in shown
    assert "words are wrong at the destination" in shown
    assert "GB/s" not in shown  # no figure for bytes that were not checked
    document = json.loads(file.read_text())
    assert document["results"] == []
    assert document["skipped"][0]["failed"]


# Exit 2: wrong usage, before anything is started.

USAGE = [
    (["--model", "llama-3.1-8"], "did you mean llama-3.1-8b"),
    (["--model", "qwen"], "qwen3-32b"),
    (["--model", ","], "--model: ',' names nothing"),
    (["--tokens", "0"], "--tokens: '0' is not a whole number above zero"),
    (["--tokens", "1e3"], "--tokens: '1e3' is not a whole number above zero"),
    (["--tokens", "-1"], "--tokens: '-1' is not a whole number above zero"),
    (["--tokens", ""], "--tokens: '' names nothing"),
    (["--tokens", "\u00b2"], "is not a whole number above zero"),
    (["--tokens", "9" * 5000], "is not a whole number above zero"),
    (["--block-size", "x"], "--block-size: 'x' is not a whole number above zero"),
    (["--block-size", "99999999999"], "block_size is 99999999999; use an integer of 1 .. "),
    (["--page-bytes", "4x"], "'4x' is not a size"),
    (["--page-bytes", "17"], "a page of 17 bytes; use a multiple of 16"),
    (["--page-bytes", ","], "--page-bytes: ',' names nothing"),
    (["--page-bytes", "4k", "--total-bytes", "0"], "'0' is 0 bytes"),
    (["--page-bytes", "4k", "--total-bytes", "9" * 400], "is not a size"),
    (["--total-bytes", "1m"], "--total-bytes is of a raw sweep; give --page-bytes"),
    (["--block-order", "sorted"], "use shuffled, contiguous or fragmented:R"),
    (["--block-order", "fragmented:0"], "use shuffled, contiguous or fragmented:R"),
    (["--dtype", "int3"], "dtype is 'int3'"),
    (["--memory", "core"], "memory core over loopback; use shared, private"),
    (["--memory", "device"], "device memory takes the nvlink transport"),
    (["--op", "send"], "--op: 'send'; use put or get"),
    (["--sms", "0"], "is not a whole number above zero"),
    (["--engine", "pigeon"], "engine 'pigeon' on host memory; use auto, memcpy or streaming"),
    (["--threads", "0"], "--threads is 0; use 1 to 256"),
    (["--threads", "257"], "--threads is 257; use 1 to 256"),
    (["--devices", "0"], "--devices: '0'; write source,destination such as 0,1"),
    (["--devices", "\u00b2,1"], "write source,destination such as 0,1"),
    (["--with-compute", "mining"], "--with-compute: 'mining'; write gemm or decode"),
    (["--with-compute", "gemm@left"], "with @src or @dst"),
    (["--iters", "0"], "--iters is 0; use 1 to 1000000"),
    (["--warmup", "-1"], "--warmup is -1; use 0 to 1000000"),
    (["--seed", "-1"], "--seed is -1; use 0 to "),
    (["--seed", str(1 << 63)], "use 0 to "),
    (["--json", "no/such/folder/f"], "cannot write 'no/such/folder/f': there is no folder"),
    (["--csv", "."], "cannot write '.': it is a folder"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE)
def test_wrong_usage_exits_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "--transport", "loopback", *TINY, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("kvxfer sweep: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert "GB/s" not in captured.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--transport", "carrier-pigeon"],
        ["--order", "dnh"],
        ["--iters", "many"],
        ["--no-such-option"],
        ["a-word"],
    ],
)
def test_what_the_parser_refuses_exits_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *arguments])
    assert ended.value.code == 2
    assert ": error: " in capsys.readouterr().err


def test_a_wrong_option_of_the_real_program() -> None:
    result = sweep("--model", "lama-3.1-8b")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("kvxfer sweep: 'lama-3.1-8b' is neither a known model nor ")
    assert "did you mean llama-3.1-8b" in result.stderr
    assert result.stderr.count("\n") == 1  # no traceback


# What was measured before an error is kept.


def test_an_error_later_keeps_the_results_before_it(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = sweep(*SHM, *TINY, "--engine", "streaming", "--json", str(file))
    assert result.returncode == 2  # cross-memory attach has no such engine
    assert "engine 'streaming' with private memory" in result.stderr
    assert "shm put, shared" in result.stdout
    document = json.loads(file.read_text())
    assert [row["memory"] for row in document["results"]] == ["shared"]
    assert document["skipped"][0]["case"].startswith("shm/private put")


# Exit 3: not here.


def test_what_is_not_available_exits_3(capsys: pytest.CaptureFixture[str]) -> None:
    found = available_transports()["nvlink"]
    if found.available:
        pytest.skip(reason="nvlink is available here, so nothing is missing")
    assert main(["sweep", "--transport", "nvlink"]) == 3
    assert found.reason in capsys.readouterr().err


def test_more_than_the_memory_exits_3(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--transport", "loopback", "--memory", "shared", "--tokens", "9999999999"]
    assert main(["sweep", *arguments]) == 3
    captured = capsys.readouterr()
    assert "skipped: loopback/shared put llama-3.1-8b 9999999999 tokens" in captured.out
    assert "use fewer --tokens or a smaller --total-bytes" in captured.out


# Ends that nobody plans.


class Running:
    """A long sweep in a session of its own, as a shell would start it."""

    def __init__(self, file: Path) -> None:
        self.process = subprocess.Popen(
            command(*LONG, "--json", str(file)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd="/",
        )
        self.child = 0

    def wait_for_the_first_result(self) -> None:
        """Until one case is measured and the long one is under way."""
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert "16 tokens" in line, line
        (self.child,) = self.children()
        time.sleep(0.3)  # into the next case; any moment must do

    def children(self) -> list[int]:
        pid = self.process.pid
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]

    def end(self) -> tuple[int, str, str]:
        """Its status and output, once it has ended by itself."""
        out, err = self.process.communicate(timeout=GONE_S)
        return self.process.returncode, out, err

    def close(self) -> None:
        for pid in (self.process.pid, self.child):
            if pid and not gone(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + GONE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "out.json"


@pytest.fixture
def running(file: Path) -> Iterator[Running]:
    sweep = Running(file)
    yield sweep
    sweep.close()


def test_ctrl_c_ends_both_and_keeps_what_was_measured(running: Running, file: Path) -> None:
    running.wait_for_the_first_result()
    os.killpg(running.process.pid, signal.SIGINT)
    status, out, err = running.end()
    assert status == 130
    assert wait_until(lambda: gone(running.child))
    assert "Traceback" not in err
    assert "interrupted: the table holds what was measured until then" in out
    document = json.loads(file.read_text())
    assert document["interrupted"] is True
    assert [row["num_tokens"] for row in document["results"]] == [16]


@pytest.mark.parametrize("delay_s", [0.1, 0.3, 0.5])
def test_ctrl_c_at_the_start_ends_it(running: Running, delay_s: float) -> None:
    time.sleep(delay_s)
    children = running.children()
    os.killpg(running.process.pid, signal.SIGINT)
    status, _, err = running.end()
    assert status != 0
    assert wait_until(lambda: all(map(gone, children)))
    if status == 130:  # else it came amid the imports, which end in their own ways
        assert "Traceback" not in err


def test_the_child_ends_with_a_parent_that_was_killed(running: Running) -> None:
    running.wait_for_the_first_result()
    assert not gone(running.child)
    running.process.kill()
    assert wait_until(lambda: gone(running.child))


def test_a_child_that_was_killed_ends_the_sweep(running: Running, file: Path) -> None:
    running.wait_for_the_first_result()
    os.kill(running.child, signal.SIGKILL)
    status, out, err = running.end()
    assert status == 1
    assert f"the peer process {running.child} ended with status -9" in err
    assert "Traceback" not in err
    document = json.loads(file.read_text())
    assert [row["num_tokens"] for row in document["results"]] == [16]
    assert document["skipped"][0]["failed"]
    assert "FAILED: shm/shared put llama-3.1-8b 1024 tokens" in out
