"""KV on both sides of hand-overs between real engines, byte by byte: by digests of every block."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_bytes_script import flip, rewrite, run
from vllm_engines import BLOCK_TOKENS, TINY, Pair, texts
from waiting import eventually

from kvxfer.connectors.vllm.digests import Line, read_lines

LENGTHS = (1, 100, 129, 300, 5 * BLOCK_TOKENS, 1500)
NUM_BLOCKS = sum((length - 1) // BLOCK_TOKENS for length in LENGTHS)
NUM_COMPARED = sum(length > BLOCK_TOKENS for length in LENGTHS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("digests")


@pytest.fixture(scope="module")
def checked(tiny: Path, folder: Path) -> Iterator[Pair]:
    """Engines that write digests, the first in chunks of 200 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVXFER_DIGESTS", str(folder / "digests.jsonl"))
        made = Pair(tiny, folder, on_failure="fail", prefill=["--max-num-batched-tokens", "200"])
    with made.running():
        yield made


@pytest.fixture(scope="module")
def handed_over(checked: Pair, folder: Path) -> Path:
    """The digests of some prompts, one of them twice."""
    for length in LENGTHS:
        asked = body(length)
        assert texts(checked.hand_over(asked)) == texts(checked.alone(asked))
    checked.hand_over(body(LENGTHS[-1]))  # the decoder has all of it by now
    path = folder / "digests.jsonl"
    eventually(lambda: len(lines(path)) == 2 * NUM_COMPARED + 1, "digests are missing")
    return path


def body(length: int) -> dict[str, Any]:
    tokens = random.Random(length).choices(range(1, 8000), k=length)
    return {"prompt": tokens, "max_tokens": 4, "temperature": 0}


def lines(path: Path) -> list[Line]:
    return list(read_lines(path)) if path.exists() else []


def test_every_byte_arrives(handed_over: Path, tmp_path: Path) -> None:
    status, text, found = run(handed_over.parent, json_file=tmp_path / "out.json")
    assert status == 0, text
    assert found["num_requests"] == NUM_COMPARED
    assert found["num_blocks"] == NUM_BLOCKS * TINY["num_layers"]
    token_bytes = 2 * TINY["num_kv_heads"] * TINY["head_dim"] * 4
    assert found["num_bytes"] == found["num_blocks"] * BLOCK_TOKENS * token_bytes
    assert (found["num_requests_sent_alone"], found["num_requests_received_alone"]) == (1, 0)
    assert found["not_comparable"] == {}


def test_no_two_blocks_have_one_digest(handed_over: Path) -> None:
    """What is compared is KV, and not zeros."""
    digests = [
        taken[at : at + 16]
        for line in lines(handed_over)
        if line.side == "received"
        for group in line.groups
        for taken in group.layers.values()
        for at in range(0, len(taken), 16)
    ]
    assert len(digests) == len(set(digests)) == NUM_BLOCKS * TINY["num_layers"]


def test_a_block_that_differs_is_named(handed_over: Path, tmp_path: Path) -> None:
    planted = tmp_path / "digests.jsonl"
    planted.write_bytes(handed_over.read_bytes())
    victim = next(line for line in lines(planted) if line.num_tokens == LENGTHS[-1] - 1)
    layer = list(victim.groups[0].layers)[2]

    def change(line: Line) -> Line:
        is_it = line.side == "received" and line.transfer == victim.transfer
        return flip(line, layer, 7) if is_it else line

    rewrite(planted, change)
    status, text, _ = run(planted)
    assert status == 1, text
    assert f"request {victim.transfer}, rank tp 0/1 pp 0/1, layer {layer}, block 7 " in text
    assert text.count("DIFFERENT") == 1
