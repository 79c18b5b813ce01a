"""``kvxfer sweep``, the real program: what it prints, writes and returns."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvxfer import _core
from kvxfer.cli.main import main
from kvxfer.transport import available_transports

DEADLINE_S = 60.0
TINY = ("--tokens", "16", "--iters", "2", "--warmup", "0", "--threads", "2")
SHM = ("--transport", "shm")


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
        assert path in result.stdout
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
    (["--page-bytes", "17"], "a page of 17 bytes; use a multiple of 32"),
    (["--page-bytes", ","], "--page-bytes: ',' names nothing"),
    (["--page-bytes", "4k", "--total-bytes", "0"], "'0' is 0 bytes"),
    (["--page-bytes", "4k", "--total-bytes", "9" * 400], "is not a size"),
    (["--total-bytes", "1m"], "--total-bytes is of a raw sweep; give --page-bytes"),
    (["--block-order", "sorted"], "use shuffled, contiguous or fragmented:R"),
    (["--block-order", "fragmented:0"], "use shuffled, contiguous or fragmented:R"),
    (["--dtype", "int3"], "dtype is 'int3'"),
    (["--memory", "core"], "memory core over loopback; use shared, private"),
    (["--memory", "device"], "device memory over loopback; use nvlink, nixl or ucx"),
    (["--op", "send"], "--op: 'send'; use put or get"),
    (["--sms", "0"], "is not a whole number above zero"),
    (["--engine", "pigeon"], "engine 'pigeon' over loopback; use auto, memcpy or streaming"),
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
    (["--sms", "4"], "--sms is of copies by a GPU; this run is over loopback"),
    (["--devices", "0,1"], "--devices is of copies by a GPU; this run is over loopback"),
    (["--with-compute", "gemm"], "--with-compute is of copies by a GPU; this run is over loopback"),
    (["--page-bytes", "4k", "--tokens", "16"], "--tokens is of a sweep of models"),
    (["--page-bytes", "4k", "--model", "qwen3-32b"], "--model is of a sweep of models"),
    (["--json", "-"], "cannot write '-'"),
    (["--json", "a", "--csv", "./a"], "'./a' is given for two outputs"),
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
    shape = TINY[2:] if "--page-bytes" in arguments else TINY
    assert main(["sweep", "--transport", "loopback", *shape, *arguments]) == 2
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
    shown = capsys.readouterr().err
    assert shown.startswith("usage: kvxfer sweep ")
    assert "kvxfer sweep: error: " in shown


def test_a_wrong_option_of_the_real_program() -> None:
    result = sweep("--model", "lama-3.1-8b")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("kvxfer sweep: 'lama-3.1-8b' is neither a known model nor ")
    assert "did you mean llama-3.1-8b" in result.stderr
    assert result.stderr.count("\n") == 1  # no traceback


def test_help_shows_no_default_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    shown = capsys.readouterr().out
    assert "(default: None)" not in shown
    assert "(default: 2)" in shown
    for engine in ("memcpy", "streaming", "bulk", "load_store", "dma"):
        assert engine in shown


# Standard output that does not take everything.


@pytest.mark.parametrize(
    ("target", "encoding", "status", "message"),
    [
        ("|", "utf-8", 0, ""),
        ("/dev/full", "utf-8", 2, "cannot write to standard output: No space left on device"),
        ("/dev/null", "ascii", 0, ""),
    ],
)
def test_files_are_written_whatever_stdout_is(
    target: str, encoding: str, status: int, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    if target == "|":
        reader, stdout = os.pipe()
        os.close(reader)
    else:
        stdout = os.open(target, os.O_WRONLY)
    try:
        result = subprocess.run(
            command("sweep", "--transport", "loopback", *TINY, "--json", str(file)),
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
            cwd="/",
            env={**os.environ, "PYTHONIOENCODING": encoding},
        )
    finally:
        os.close(stdout)
    assert result.returncode == status, result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == bool(message)
    assert len(json.loads(file.read_text())["results"]) == 2


# What a case cannot do is skipped, and the others are kept.


def test_an_engine_that_one_case_lacks_skips_it(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = sweep(*SHM, *TINY, "--engine", "streaming", "--json", str(file))
    assert (result.returncode, result.stderr) == (0, "")
    assert "no engine streaming for private memory; only auto" in result.stdout
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


@pytest.mark.skipif(_core.device_count() > 0, reason="with a GPU auto takes it")
@pytest.mark.parametrize(
    "words", [["--with-compute", "gemm"], ["--sms", "8"], ["--devices", "0,1"]]
)
def test_options_of_gpus_without_one_exit_3(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["sweep", *TINY, *words]) == 3
    shown = capsys.readouterr()
    assert f"{words[0]} is of copies by a GPU; this run is over shm: " in shown.err
    assert _core.no_device_reason() in shown.err
    assert shown.out == ""


def test_more_than_the_memory_exits_3(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--transport", "loopback", "--memory", "shared", "--tokens", "9999999999"]
    assert main(["sweep", *arguments]) == 3
    captured = capsys.readouterr()
    assert "skipped: loopback/shared put llama-3.1-8b 9999999999 tokens" in captured.out
    assert "use fewer --tokens or a smaller --total-bytes" in captured.out
