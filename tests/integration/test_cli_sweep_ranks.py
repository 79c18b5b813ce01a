"""``kvxfer sweep`` of ranks, the real program with a process a rank."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvxfer.cli.main import main

DEADLINE_S = 90.0
GONE_S = 60.0  # far above what an end takes
TINY = ("--transport", "shm", "--tokens", "40", "--iters", "2", "--warmup", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model so small that a row is quick."""
    file = tmp_path_factory.mktemp("model") / "config.json"
    shape = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    file.write_text(json.dumps({**shape, "head_dim": 32, "hidden_size": 256}))
    return str(file)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvxfer", "-v", "sweep", *arguments]


def sweep(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The report and the text of a sweep that went well."""
    file = tmp_path / "out.json"
    done = subprocess.run(
        command(*TINY, *arguments, "--json", str(file)),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd="/",  # not the source tree, whose kvxfer has no core
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report: dict[str, Any] = json.loads(file.read_text())
    assert all(row["verified"] for row in report["results"])
    return report, done.stdout


def test_pairs_of_sizes(tmp_path: Path, model: str) -> None:
    report, text = sweep(
        tmp_path, "--model", model, "--tp", "2:1,1:2,6:4", "--op", "put,get", "--memory",
        "shared,private",
    )  # fmt: skip
    rows = report["results"]
    assert [(row["memory"], row["op"], row["src_tp"], row["dst_tp"]) for row in rows] == [
        (memory, op, *tp)
        for memory in ("shared", "private")
        for op in ("put", "get")
        for tp in ((2, 1), (1, 2), (6, 4))
    ]
    block_bytes = 40 * 2 * 4 * 4 * 32 * 2  # tokens, K|V, layers, heads, dim, bytes
    assert {row["total_bytes"] for row in rows if row["dst_tp"] < 3} == {block_bytes}
    for row in rows:  # of 6:4 some runs are of one token, others of a block
        whole = row["num_runs"] * row["run_bytes"] == row["total_bytes"]
        assert whole == (row["src_tp"] < 6)
    for path in ("shared segment", "cross-memory attach, process_vm_writev"):
        assert path in text
    assert " 6:4 " in text


def test_heads_and_stages(tmp_path: Path, model: str) -> None:
    report, _ = sweep(
        tmp_path, "--model", model, "--tp", "2:4", "--pp", "1:1,2:1", "--kv-heads", "2,6"
    )
    assert [(row["num_kv_heads"], row["src_pp"]) for row in report["results"]] == [
        (2, 1),
        (2, 2),
        (6, 1),
        (6, 2),
    ]


def test_a_matrix_of_layouts(tmp_path: Path, model: str) -> None:
    report, text = sweep(tmp_path, "--model", model, "--layouts")
    rows = report["results"]
    sources = list(dict.fromkeys(row["src_layout"] for row in rows))
    destinations = list(dict.fromkeys(row["dst_layout"] for row in rows))
    assert sources == [
        "nhd split 16",
        "hnd split 16",
        "nhd packed 16",
        "nhd split 64",
        "hnd head_packed 128",
        "nhd chunked 256",
    ]
    assert destinations == [*sources, "nhd split 16 fp8_e4m3"]
    assert len(rows) == len(sources) * len(destinations)
    converted = [row["convert"] for row in rows if row["dst_layout"].endswith("fp8_e4m3")]
    assert set(converted) == {"bfloat16 to fp8_e4m3"}
    assert "rows: source, columns: destination" in text
    assert text.count("%)") == len(rows)


def test_layouts_of_ones_own_and_what_cannot_meet(tmp_path: Path, model: str) -> None:
    report, text = sweep(
        tmp_path, "--model", model, "--tp", "2:1", "--layouts", "order=hnd", "block=32,dtype=fp8"
    )
    assert [(row["src_layout"], row["dst_layout"]) for row in report["results"]] == [
        ("hnd split 16", "hnd split 16"),
        ("hnd split 16", "nhd split 32 fp8_e4m3"),
        ("nhd split 32 fp8_e4m3", "nhd split 32 fp8_e4m3"),
    ]
    (refused,) = report["skipped"]
    assert not refused["failed"]
    assert (refused["src_layout"], refused["dst_layout"]) == (
        "nhd split 32 fp8_e4m3",
        "hnd split 16",
    )
    assert "dtype is fp8_e4m3 at the source and bfloat16 at the destination" in text
    assert any(line.split()[-1:] != ["-"] and " - " in line for line in text.splitlines())


def test_wrong_bytes_of_one_rank_exit_1(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second source rank is a program that copies a block less."""
    program = tmp_path / "faulty.py"
    program.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1] / 'helpers')!r})\n"
        "import kvxfer.sweep.agent_main as main\n"
        "from rank_teams import FaultyAgent, swaps_two_blocks\n"
        "main.RankAgent = lambda: FaultyAgent(swaps_two_blocks)\n"
        "sys.exit(main.main())\n"
    )
    popen, started = subprocess.Popen, []

    def plant(arguments: list[str], **options: Any) -> Any:
        started.append(arguments)
        if len(started) == 2:
            arguments = [sys.executable, str(program)]
        return popen(arguments, **options)

    monkeypatch.setattr("kvxfer.sweep.agent_process.subprocess.Popen", plant)
    assert main(["sweep", *TINY, "--model", model, "--tp", "2:2"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED: shm/shared put TP 2:2" in shown
    assert "8-byte words are wrong at the destination, the first in layer " in shown
    assert "GB/s" not in shown


USAGE = [
    (["--tp", "2"], "--tp: '2'; write source:destination sizes such as 2:1"),
    (["--tp", "0:1"], "--tp: '0:1' has a size of 0; use 1 or more on either side"),
    (["--tp", ","], "--tp: ',' names nothing"),
    (["--pp", "5:1"], "pp_size is 5 for 4 layers"),
    (["--kv-heads", "x"], "--kv-heads: 'x' is not a whole number above zero"),
    (["--layouts", "order=dnh"], "--layouts: order is 'dnh'; use nhd, hnd"),
    (["--layouts", "sglang"], "--layouts: 'sglang' is no key=value; the first item may be vllm"),
    (["--layouts", "tp=2"], "--layouts: 'tp=2' has tp or pp; give --tp and --pp instead"),
    (["--layouts", "--block-size", "16,32"], "--block-size is a list; with --layouts give one"),
    (["--tp", "1:1", "--devices", "0:1"], "--devices is of copies by a GPU"),
    (["--tp", "1:1", "--devices", "0:1:2"], "write source,destination such as 0,1, or lists"),
    (["--devices", "0,1:2"], "--devices names several GPUs of a side"),
    (["--tp", "1:1", "--transport", "loopback"], "loopback is one process, and each rank is one"),
    (["--tp", "8:9"], "--tp: 8:9; "),
    (["--kv-heads", "5000"], "has 8 attention heads, so use 1 .. 8"),
    (["--json", ""], "cannot write '': name a file"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE)
def test_wrong_usage_exits_2_and_starts_nothing(
    arguments: list[str],
    message: str,
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvxfer.sweep.ranks.runner.RankTeam", lambda _: pytest.fail("started"))
    assert main(["sweep", *TINY, "--model", model, *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.startswith("kvxfer sweep: ")


def test_page_sizes_are_of_one_pair(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--transport", "shm", "--tp", "1:1", "--page-bytes", "4k"]
    assert main(["sweep", *arguments]) == 2
    assert "a sweep of ranks is of models; leave --page-bytes" in capsys.readouterr().err


# Ends.


class Running:
    """A sweep whose second row would go on for a good while."""

    def __init__(self, model: str, file: Path) -> None:
        arguments = ("--model", model, "--tokens", "40,40000", "--iters", "200", "--tp", "2:2")
        self.process = subprocess.Popen(
            command(*TINY, *arguments, "--json", str(file)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd="/",
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert "TP 2:2" in line, line
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task").glob("*/children")
        self.ranks = [int(child) for file in children for child in file.read_text().split()]
        assert len(self.ranks) == 4
        time.sleep(0.3)  # into the next row; any moment must do

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=GONE_S)
        return self.process.returncode, out, err

    def all_gone(self) -> bool:
        deadline = time.monotonic() + GONE_S
        while not all(map(gone, self.ranks)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return all(map(gone, self.ranks))

    def close(self) -> None:
        for pid in (self.process.pid, *self.ranks):
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def running(model: str, tmp_path: Path) -> Any:
    started = Running(model, tmp_path / "out.json")
    yield started
    started.close()


def test_ctrl_c_ends_all_ranks_and_keeps_what_was_measured(running: Any, tmp_path: Path) -> None:
    os.killpg(running.process.pid, signal.SIGINT)
    status, out, err = running.end()
    assert status == 130
    assert running.all_gone()
    assert "Traceback" not in err
    assert "interrupted: the table holds what was measured until then" in out
    document = json.loads((tmp_path / "out.json").read_text())
    assert [row["num_tokens"] for row in document["results"]] == [40]


@pytest.mark.parametrize("place", [0, 3])
def test_a_rank_that_dies_ends_the_sweep_and_is_named(
    running: Any, tmp_path: Path, place: int
) -> None:
    os.kill(running.ranks[place], signal.SIGKILL)
    status, out, err = running.end()
    assert status == 1
    assert running.all_gone()
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith("kvxfer sweep: ended by what is marked FAILED; 1 of 2 rows")
    text = f"the peer process {running.ranks[place]} ended with status -9"
    assert re.search(rf" rank \d of 2: {text}", out)
    assert text not in last
    document = json.loads((tmp_path / "out.json").read_text())
    assert [row["num_tokens"] for row in document["results"]] == [40]
    assert document["skipped"][0]["failed"]
    assert "FAILED: shm/shared put TP 2:2" in out


def test_the_ranks_end_with_a_parent_that_was_killed(running: Any) -> None:
    running.process.kill()
    assert running.all_gone()
