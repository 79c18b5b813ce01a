"""``bench/kv_bytes.py``: what it pairs, what it finds, and what it does not compare."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bench_scripts import load_script
from digest_cases import BLOCK, DIM, HEADS, NumpySums, Worker, copied, random_caches
from kv_bytes_script import flip, rewrite, run
from vllm_fakes import FakeTensor, layer_names

from kvxfer.connectors.vllm import digests
from kvxfer.connectors.vllm.digests import Line, read_lines
from kvxfer.layout import TPLayout

SRC, DST = [5, 2, 6, 1], [1, 7, 3, 4]
N = 3 * BLOCK + 1
BLOCK_BYTES = 2 * BLOCK * HEADS * DIM * 4
LAYOUTS = {
    "flash": ((8, 2, BLOCK, HEADS, DIM), 0, {}),
    "K and V apart": ((2, 8, BLOCK, HEADS, DIM), 1, {}),
    "side by side": ((8, HEADS, BLOCK, 2 * DIM), 0, {}),
    "latents": ((8, BLOCK, 4 * DIM), 0, {"heads": 1, "is_mla": True}),
}


@pytest.fixture(autouse=True)
def _by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PageSums", NumpySums)


class Both:
    """A sender and a receiver that write to one file, with the blocks handed over."""

    def __init__(self, path: Path, layout: str = "flash") -> None:
        shape, axis, part = LAYOUTS[layout]
        self.path = path
        self.axis = axis
        self.source = random_caches(*shape, seed=1)
        self.target = random_caches(*shape, seed=2)
        copied(self.source, self.target, list(zip(SRC, DST, strict=True)), axis)
        self.sender = Worker(path, self.source, **part)
        self.receiver = Worker(path, self.target, **part)

    def hand_over(self, *, held: int = 0) -> None:
        self.receiver.receives(DST, N, held=held)
        self.sender.sends(SRC, N)

    def page(self, layer: int, block: int) -> Any:
        caches: Sequence[FakeTensor] = list(self.target.values())
        return caches[layer].array[(*(slice(None),) * self.axis, block)]


@pytest.fixture
def both(tmp_path: Path) -> Both:
    return Both(tmp_path / "digests.jsonl")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_arrived_is_what_was_sent(tmp_path: Path, layout: str) -> None:
    both = Both(tmp_path / "digests.jsonl", layout)
    both.hand_over()
    block_bytes = next(read_lines(both.path)).block_bytes
    status, text, found = run(tmp_path, json_file=tmp_path / "out.json")
    assert status == 0, text
    assert text.startswith(f"1 requests compared: 6 blocks of layers, {6 * block_bytes:,} bytes, 0")
    assert (found["num_requests"], found["num_blocks"]) == (1, 6)
    assert found["num_bytes"] == 6 * block_bytes
    assert found["differences"] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_wrong_bit_is_named(tmp_path: Path, layout: str) -> None:
    both = Both(tmp_path / "digests.jsonl", layout)
    raw = both.page(1, DST[2]).view("u1")
    raw[(-1,) * raw.ndim] ^= 0x80
    both.hand_over()
    status, text, found = run(tmp_path, json_file=tmp_path / "out.json")
    assert status == 1, text
    name = layer_names(2)[1]
    assert f"request t, rank tp 0/1 pp 0/1, layer {name}, block 2 (tokens 8 to 11)" in text
    (difference,) = found["differences"]
    assert (difference["request"], difference["layer"], difference["block"]) == ("t", name, 2)


def test_blocks_that_changed_places_are_found(both: Both) -> None:
    one, other = both.page(0, DST[0]), both.page(0, DST[1])
    one[...], other[...] = other.copy(), one.copy()
    both.hand_over()
    status, text, _ = run(both.path)
    assert status == 1
    assert text.count("DIFFERENT") == 2


def test_the_block_of_the_end_is_not_compared(both: Both) -> None:
    both.page(0, DST[3])[...] = 0
    both.hand_over()
    assert run(both.path)[0] == 0


def test_what_the_decoder_had_is_not_compared(both: Both) -> None:
    both.page(0, DST[0])[...] = 0
    both.hand_over(held=BLOCK)
    status, text, found = run(both.path, json_file=both.path.with_name("out.json"))
    assert status == 0, text
    assert (found["num_blocks"], found["num_sent_blocks_not_received"]) == (4, 2)


def test_engines_may_stand_in_different_folders(tmp_path: Path) -> None:
    both = Both(tmp_path / "one" / "d.jsonl")
    for name, worker in (("one", both.sender), ("two", both.receiver)):
        (tmp_path / name).mkdir()
        worker.digests._file._path = tmp_path / name / "d.jsonl"
    both.hand_over()
    (tmp_path / "one" / "prefill.log").write_text("not digests")
    (tmp_path / "two" / "empty.jsonl").touch()
    status, text, _ = run(tmp_path)
    assert status == 0, text


def test_the_same_name_in_two_set_ups_is_two_requests(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        Both(tmp_path / name / "d.jsonl").hand_over()
    rewrite(tmp_path / "two" / "d.jsonl", lambda line: flip(line, layer_names(2)[0], 0))
    status, text, _ = run(tmp_path)
    assert status == 0, text  # both sides of the second have changed alike
    assert text.startswith("2 requests")


def compared(path: Path) -> Any:
    module = load_script("kv_bytes")
    return module.compare((path.parent, line) for line in read_lines(path))


def changed(path: Path, side: str, **fields: Any) -> Any:
    def change(line: Line) -> Line:
        return msgspec.structs.replace(line, **fields) if line.side == side else line

    rewrite(path, change)
    return compared(path)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"rank": "tp 0/2 pp 0/1"}, "ranks must be as many"),
        ({"layout": "another"}, "caches differ"),
        ({"has_replicas": True}, "held by several ranks"),
        ({"num_tokens": 99}, "99 received"),
    ],
)
def test_what_cannot_be_compared_is_no_difference(
    both: Both, fields: dict[str, Any], why: str
) -> None:
    both.hand_over()
    found = changed(both.path, "received", **fields)
    assert (found.status, found.differences) == (3, [])
    assert why in load_script("kv_bytes").as_text(found)


def test_one_that_was_sent_twice_is_not_compared(both: Both) -> None:
    both.hand_over()
    both.sender.sends(SRC, N)
    found = compared(both.path)
    assert (found.status, list(found.not_comparable)) == (3, ["sent more than once under one name"])


def test_a_request_of_one_side_alone(both: Both) -> None:
    both.hand_over()
    found = changed(both.path, "sent", transfer="another")
    assert (found.num_sent_alone, found.num_received_alone, found.status) == (1, 1, 3)
    assert "alone" in load_script("kv_bytes").as_text(found)


def test_a_block_that_was_never_sent_is_a_difference(both: Both) -> None:
    both.receiver.receives(DST, N)
    both.sender.sends([5, 0, 6, 1], N)
    found = compared(both.path)
    assert found.status == 1
    assert [(one.block, one.what) for one in found.differences] == [(1, "was not sent")] * 2


def test_each_rank_is_compared_with_its_like(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    for rank in (0, 1):
        source = random_caches(8, 2, BLOCK, 1, DIM, seed=rank)
        tp = TPLayout(2, rank)
        Worker(path, source, rank=tp).sends(SRC, N)
        Worker(path, source, rank=tp).receives(SRC, N)
    found = compared(path)
    assert (found.status, len(found.requests), found.num_blocks) == (0, 1, 12)
    assert found.num_bytes == 6 * BLOCK_BYTES


def test_many_differences_are_counted(both: Both) -> None:
    both.hand_over()
    module = load_script("kv_bytes")
    found = compared(both.path)
    found.differences = [
        module.Difference("t", "r", "layer", block, (0, 4), "other") for block in range(30)
    ]
    assert "... and 10 more" in module.as_text(found)


def test_nothing_to_compare(tmp_path: Path) -> None:
    status, text, _ = run(tmp_path)
    assert (status, text.startswith("0 requests")) == (3, True)


def test_what_cannot_be_read(both: Both) -> None:
    assert run(both.path.with_name("missing"))[0] == 2
    both.path.write_bytes(digests.MARK + b"\n")
    status, text, _ = run(both.path)
    assert (status, "line 1" in text) == (2, True)
