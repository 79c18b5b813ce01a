"""``kvxfer model``: the figures it prints and writes."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvxfer.cli import model
from kvxfer.errors import InvalidUsage

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    return model.run(parser.parse_args(arguments))


def cells(text: str) -> dict[str, list[str]]:
    """The rows of all tables by their first cell."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (GIB, "1.000 GiB"),
        (4227858432, "3.9375 GiB"),
        (GIB // 8, "128 MiB"),
        (32768, "32 KiB"),
        (1234 * GIB, "1234.000 GiB"),
    ],
)
def test_gib_has_three_or_four_decimals_and_less_a_smaller_unit(num_bytes: int, text: str) -> None:
    assert model.format_size(num_bytes) == text


def test_llama_8b(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("Llama-3.1-8B", "--tokens", "8192") == 0
    rows = cells(capsys.readouterr().out)
    assert rows["token, one layer"][0] == "4,096"
    assert rows["token, all layers"][0] == "131,072"
    assert rows["page (block, one plane)"][0] == "32,768"
    assert rows["block (64 planes)"][0] == "2,097,152"
    assert rows["layer, all tokens"][0] == "33,554,432"
    assert rows["request"] == ["1,073,741,824", "1.000 GiB"]


def test_405b(capsys: pytest.CaptureFixture[str]) -> None:
    run("llama-3.1-405b")
    assert cells(capsys.readouterr().out)["request"][-1] == "3.9375 GiB"


def test_requests_are_exact_and_blocks_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    run("llama-3.1-8b", "--tokens", "17", "--block-size", "32", "--dtype", "fp8")
    rows = cells(capsys.readouterr().out)
    assert rows["request"][0] == f"{17 * 65536:,}"
    assert rows["request, 1 whole blocks"][0] == f"{32 * 65536:,}"


def test_ranks_with_uneven_heads(capsys: pytest.CaptureFixture[str]) -> None:
    run("llama-3.1-405b", "--tp", "3")
    rows = cells(capsys.readouterr().out)
    assert rows["0"] == ["0-2", "12,288", "1,585,446,912", "1.4766 GiB"]
    assert rows["1"][0] == "2-5"
    assert rows["2"][0] == "5-7"


def test_mla_ranks_hold_the_whole_latent(capsys: pytest.CaptureFixture[str]) -> None:
    run("deepseek-v3", "--tp", "2")
    rows = cells(capsys.readouterr().out)
    assert rows["0"] == rows["1"] == ["latent", "18,432", "575,668,224", "549 MiB"]


def test_windows_kept(capsys: pytest.CaptureFixture[str]) -> None:
    run("gpt-oss-120b")
    rows = cells(capsys.readouterr().out)
    assert rows["request, 18 layers keep 128 tokens"][0] == f"{18 * 2048 * (8192 + 128):,}"
    run("llama-3.1-8b")
    assert "keep" not in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [8192, 1_000_000_000])
def test_figures_are_whole_at_80_columns(tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    run("gpt-oss-120b", "--tp", "4", "--tokens", str(tokens))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    rows = cells(out)
    assert rows["request"][0] == f"{73728 * tokens:,}"
    for rank in range(4):
        row = rows[str(rank)]
        assert row[0] == f"{2 * rank}-{2 * rank + 1}"
        assert row[2] == f"{18432 * tokens:,}"
        assert row[-1] == f"{18 * 512 * (tokens + 128):,}"


def test_figures_are_whole_where_there_is_no_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    run("gpt-oss-120b", "--tp", "4")
    out = capsys.readouterr().out
    assert "…" not in out
    assert "603,979,776" in out
    assert cells(out)["3"] == ["6-7", "4,096", "150,994,944", "144 MiB", "76,677,120"]


def test_json_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    run("gpt-oss-120b", "--tp", "4", "--json", str(target))
    assert "request" in capsys.readouterr().out
    document: dict[str, Any] = json.loads(target.read_text())
    assert document["model"]["sliding_layers"] == 18
    assert document["layout"]["kv"] == "split"
    assert document["num_tokens"] == 8192
    assert document["whole"]["request_bytes"] == 73728 * 8192
    assert document["whole"]["windowed_request_bytes"] == 18 * 2048 * (8192 + 128)
    assert [rank["tp_rank"] for rank in document["ranks"]] == [0, 1, 2, 3]
    ranks_bytes = sum(rank["request_bytes"] for rank in document["ranks"])
    assert ranks_bytes == document["whole"]["request_bytes"]


def test_json_to_stdout_is_nothing_but_json(capsys: pytest.CaptureFixture[str]) -> None:
    run("llama-3.1-8b", "--json", "-")
    document = json.loads(capsys.readouterr().out)
    assert document["whole"]["request_bytes"] == GIB
    assert document["whole"]["windowed_request_bytes"] is None


def test_markup_in_a_name_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "[red]x.json"
    path.write_text('{"n_layer": 2, "n_head": 2, "n_embd": 8}')
    run(str(path))
    assert "[red]x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "neither a known model nor an existing path"),
        (["llama-3.1-8b", "--tp", "0"], r"--tp is 0; .* use 1 \.\. 32"),
        (["llama-3.1-8b", "--tp", "33"], "llama-3.1-8b has 32 attention heads"),
        (["llama-3.1-8b", "--tokens", "0"], "--tokens: '0' is not a whole number above zero"),
        (["llama-3.1-8b", "--tokens", "-1"], "--tokens: '-1' is not .*; give one such as 8192"),
        (["llama-3.1-8b", "--tokens", "x"], "--tokens: 'x' is not .*; give one such as 8192"),
        (["llama-3.1-8b", "--block-size", "0"], "block_size is 0"),
        (["llama-3.1-8b", "--dtype", "int3"], "dtype is 'int3'"),
        (["llama-3.1-8b", "--json", ""], "cannot write '': name a file"),
        (
            ["llama-3.1-8b", "--json", "no/such/dir/f"],
            "cannot write 'no/such/dir/f': there is no folder",
        ),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidUsage, match=message):
        run(*arguments)
