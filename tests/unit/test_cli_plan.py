"""``kvxfer plan``: figures against the arithmetic of layouts, and the picture read back."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvxfer.cli.main import main
from kvxfer.layout import CATALOGUE, TPLayout

Capture = pytest.CaptureFixture[str]
MARGIN = 12


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def figures(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json", "-"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def printed(capsys: Capture, *arguments: str) -> list[str]:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def received(document: dict[str, Any]) -> list[int]:
    return [rank["received_bytes"] for rank in document["dst"]["ranks"]]


# Figures.


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("tp=2", "tp=4"),
        ("tp=6", "tp=4"),
        ("tp=8,order=hnd", "tp=6,block=64"),
        ("tp=16,pp=2", "vllm-cpu,tp=3,pp=3"),
        ("tp=2", "lmcache,tp=1"),
    ],
)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-120b", "deepseek-v3"])
def test_each_destination_gets_what_it_holds(
    src: str, dst: str, model: str, capsys: Capture
) -> None:
    if model == "deepseek-v3":
        dst = dst.replace("lmcache,", "")
    document = figures(capsys, "--src", src, "--dst", dst, "--model", model, "--no-windowed")
    tp, pp = (int((re.search(f"{axis}=([0-9]+)", dst) or "=1")[1]) for axis in ("tp", "pp"))
    whole = CATALOGUE[model].kv_layout()
    ranks = [TPLayout(tp, t, pp_size=pp, pp_rank=p) for p in range(pp) for t in range(tp)]
    assert received(document) == [rank.rank_layout(whole).request_bytes(8192) for rank in ranks]
    sent = [rank["sent_bytes"] for rank in document["src"]["ranks"]]
    assert sum(sent) == sum(received(document)) == document["total_bytes"]
    assert sum(pair["num_bytes"] for pair in document["pairs"]) == document["total_bytes"]
    for pair in document["pairs"]:
        (run_bytes,) = pair["run_bytes"]
        assert pair["num_runs"] * run_bytes == pair["num_bytes"]


def test_windows_move_their_last_tokens(capsys: Capture) -> None:
    model = CATALOGUE["gpt-oss-120b"]
    document = figures(capsys, "--model", model.name, "--src", "tp=2", "--tokens", "1000")
    assert document["total_bytes"] == model.windowed_request_bytes(model.kv_layout(), 1000)
    assert (document["num_sliding"], document["window"]) == (18, 128)
    assert "18 of 36 layers slide" in "\n".join(printed(capsys, "--model", model.name))
    whole = figures(capsys, "--model", model.name, "--tokens", "1000", "--no-windowed")
    assert whole["total_bytes"] == model.kv_layout().request_bytes(1000)
    assert whole["num_sliding"] == 0


def test_a_prefix_is_not_moved(capsys: Capture) -> None:
    document = figures(capsys, "--tokens", "1000", "--prefix", "123", "--dst", "block=64")
    layout = CATALOGUE["llama-3.1-8b"].kv_layout()
    assert document["total_bytes"] == layout.request_bytes(1000 - 123)
    assert document["tokens"] == [123, 1000]


def test_fp8_writes_half(capsys: Capture) -> None:
    layout = CATALOGUE["llama-3.1-8b"].kv_layout(dtype="fp8")
    document = figures(capsys, "--dst", "dtype=fp8")
    assert document["converts"]
    assert document["total_bytes"] == layout.request_bytes(8192)
    lines = printed(capsys, "--dst", "dtype=fp8,order=hnd")
    assert any("256 B → 128 B" in line for line in lines)


def test_other_heads(capsys: Capture) -> None:
    document = figures(capsys, "--kv-heads", "5", "--src", "tp=3", "--dst", "tp=2")
    assert document["num_kv_heads"] == 5
    assert max(rank["heads"][1] for rank in document["dst"]["ranks"]) == 5


def test_times_are_given_for_each_source(capsys: Capture) -> None:
    ranks = figures(capsys, "--src", "tp=3")["src"]["ranks"]
    assert all(rank["plan_us"] > 0 and rank["route_us"] > 0 for rank in ranks)


def test_a_file_has_the_figures_beside_the_table(tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "plan.json"
    assert any("src tp 1" in line for line in printed(capsys, "--json", str(target)))
    assert json.loads(target.read_text())["schema"] == "kvxfer.plan/1"


# The table.


def test_the_table_says_each_pair(capsys: Capture) -> None:
    lines = printed(capsys, "--src", "tp=6", "--dst", "tp=4")
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert ["0", "0", "0–31", "0", "172 MiB", "704,512", "256 B", "44,032", "2"] in rows
    assert ["0–10", "1"] in rows
    assert ["1", "1", "0–20", "2", "84 MiB", "344,064", "256 B", "21,504", "1"] in rows
    assert max(map(len, lines)) <= 80


def test_many_pairs_are_left_to_the_file(capsys: Capture) -> None:
    lines = printed(capsys, "--model", "deepseek-v3", "--src", "tp=16", "--dst", "tp=16")
    assert "256 pairs are too many" in lines[-1]
    assert not any(line.split()[:2] == ["from", "to"] for line in lines)


# The picture, read back: which bar stands above which.


def spans(row: str) -> Iterator[tuple[int, int, str]]:
    """(first wall, last wall, label) of the boxes in their middle row."""
    row = row.replace("┊", " ")
    walls = [column for column, char in enumerate(row) if char == "│"]
    for first, last in pairwise(walls):
        if label := row[first + 1 : last].strip():
            yield first, last, label


def labels_at(row: str, column: int) -> list[str]:
    return [label for first, last, label in spans(row) if first <= column <= last]


def ranks_of(label: str) -> list[int]:
    if "–" in label:
        first, last = map(int, label.split("–"))
        return list(range(first, last + 1))
    return [int(rank) for rank in label.split(",")]


def arrows(lines: list[str]) -> set[tuple[int, int]]:
    """The pairs of ranks that the one picture of ``lines`` joins, its rows from "src tp" on."""
    top = next(number for number, line in enumerate(lines) if line.startswith("  src tp"))
    rows = [line[MARGIN:].ljust(80) for line in lines[top:]]
    found = set()
    for number in range(2, len(rows)):
        for column, char in enumerate(rows[number]):
            if char != "▼":
                continue
            above = {rows[row][column] for row in range(2, number)}
            assert above <= {"┊", "▼"}
            assert rows[1][column] in "┬┼"
            (src,) = labels_at(rows[0], column)
            for dst in labels_at(rows[number + 2], column):
                found |= {(int(src), rank) for rank in ranks_of(dst)}
    return found


@pytest.mark.parametrize(
    ("model", "src_tp", "dst_tp"),
    [
        ("llama-3.1-8b", 2, 4),
        ("llama-3.1-8b", 4, 2),
        ("llama-3.1-8b", 6, 4),
        ("llama-3.1-8b", 8, 6),
        ("llama-3.1-8b", 16, 4),
        ("llama-3.1-8b", 4, 16),
        ("llama-3.1-8b", 5, 7),
        ("llama-3.1-8b", 7, 5),
        ("llama-3.1-8b", 1, 1),
        ("deepseek-v3", 4, 2),
        ("deepseek-v3", 3, 8),
        ("qwen2.5-7b", 7, 2),
        ("qwen2.5-7b", 3, 7),
        ("gpt-oss-120b", 2, 4),
    ],
)
def test_the_picture_joins_the_pairs_of_the_plan(
    model: str, src_tp: int, dst_tp: int, capsys: Capture
) -> None:
    arguments = ["--model", model, "--src", f"tp={src_tp}", "--dst", f"tp={dst_tp}"]
    lines = printed(capsys, *arguments)
    pairs = {(pair["src"], pair["dst"]) for pair in figures(capsys, *arguments)["pairs"]}
    assert arrows(lines) == pairs
    assert max(map(len, lines)) <= 80


def test_reading_the_picture_sees_a_missing_arrow_and_a_wrong_one(capsys: Capture) -> None:
    lines = printed(capsys, "--src", "tp=2", "--dst", "tp=4")
    pairs = arrows(lines)
    row = next(number for number, line in enumerate(lines) if "▼" in line)
    lines[row] = lines[row].replace("▼", " ", 1)
    assert arrows(lines) == pairs - {(0, 0)}
    lines[row + 2] = lines[row + 2].translate(str.maketrans("12", "21"))
    assert arrows(lines) == {(0, 2), (1, 1), (1, 3)}


def test_stages_are_drawn_over_layers(capsys: Capture) -> None:
    text = "\n".join(printed(capsys, "--src", "tp=2,pp=2", "--dst", "tp=2"))
    assert re.search(r"src pp 2 +│ +pp0 +│ +pp1 +│", text)
    assert re.search(r"dst pp 1 +│ +pp0 +│", text)
    assert text.count("src tp 2") == 1  # both stages look the same


def test_stages_that_differ_are_drawn_apart(capsys: Capture) -> None:
    text = "\n".join(printed(capsys, "--src", "tp=16", "--dst", "tp=2,pp=2"))
    assert re.search(r"layers 0–15\n.*\n.*\n +src tp 16 │ +0 +│ +2 +│", text)
    assert re.search(r"layers 16–31\n.*\n.*\n +src tp 16 │ +1 +│ +3 +│", text)


def test_a_cut_inside_a_head_is_explained(capsys: Capture) -> None:
    note = "a wall inside a head divides its layers"
    assert note in "\n".join(printed(capsys, "--src", "tp=6"))
    assert note not in "\n".join(printed(capsys, "--src", "tp=4"))


def test_ranks_that_do_not_fit_are_not_drawn(capsys: Capture) -> None:
    model = ["--model", "deepseek-v3"]
    lines = printed(capsys, *model, "--src", "tp=128")
    assert "  no picture: the ranks do not fit into 80 columns" in lines


# Refusals.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--src", "tp=0"], "--src: tp is '0'"),
        (["--dst", "size=1"], "--dst: 'size' is no key"),
        (["--src", "tp=64"], "tp is 64; llama-3.1-8b has 32 attention heads, so use 1 .. 32"),
        (["--dst", "pp=33"], "pp is 33; llama-3.1-8b has 32 layers"),
        (["--dst", "tp=32,pp=32"], "tp x pp is 1024 ranks; use at most 256"),
        (["--tokens", "0"], "--tokens: '0' is not a whole number of 1 .."),
        (["--prefix", "8192"], "--prefix: '8192' is not a whole number of 0 .. 8191"),
        (["--kv-heads", "33"], "--kv-heads: '33' is not a whole number of 1 .. 32"),
        (["--model", "deepseek-v3", "--kv-heads", "2"], "has one latent (MLA)"),
        (["--model", "deepseek-v3", "--dst", "kv=chunked"], "--dst: kv is chunked"),
        (["--model", "deepseek-v3", "--src", "lmcache"], "--src: lmcache is kv=chunked"),
        (["--json", ""], "cannot write '': name a file"),
        (["--src", "dtype=fp8"], "dtype is fp8_e4m3 at the source and bfloat16"),
        (["--dst", "dtype=int8"], "dtype is bfloat16 at the source and int8"),
        (["--json", "no/such/dir/f"], "cannot write 'no/such/dir/f'"),
    ],
)
def test_wrong_arguments_are_wrong_usage(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out
