"""Digests of KV: which blocks have one, when they are written, and what the sums see."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digest_cases import BLOCK, DIM, HEADS, NumpySums, Worker, random_caches
from vllm_fake_engine import FakeEngine
from vllm_fakes import blocks, receive_params, request, send_params, step

from kvxfer.connectors.vllm import digests
from kvxfer.connectors.vllm.cache_map import ModelPart, map_caches
from kvxfer.connectors.vllm.digests import Line, read_lines
from kvxfer.connectors.vllm.page_sums import weights, word_bytes
from kvxfer.connectors.vllm.receive_side import Ended
from kvxfer.connectors.vllm.step import GivenUp, StepPlan
from kvxfer.env import digests_file
from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout

SHAPE = (8, 2, BLOCK, HEADS, DIM)


@pytest.fixture(autouse=True)
def _by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PageSums", NumpySums)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "digests.jsonl"


def worker(path: Path, **args: Any) -> Worker:
    return Worker(path, random_caches(*SHAPE, seed=1), **args)


def lines(path: Path) -> list[Line]:
    return list(read_lines(path)) if path.exists() else []


def places(line: Line) -> list[list[int]]:
    return [group.blocks for group in line.groups]


def test_the_environment_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVXFER_DIGESTS", raising=False)
    assert digests_file() is None
    monkeypatch.setenv("KVXFER_DIGESTS", "")
    assert digests_file() is None
    monkeypatch.setenv("KVXFER_DIGESTS", "some.jsonl")
    assert digests_file() == Path("some.jsonl")


def test_whole_blocks_of_the_prompt_have_a_digest(path: Path) -> None:
    worker(path).sends([5, 2, 6], 10)
    (line,) = lines(path)
    assert path.read_bytes().startswith(digests.MARK)
    assert (line.side, line.transfer, line.attempt, line.num_tokens) == ("sent", "t", 1, 10)
    assert (line.rank, line.block_tokens) == ("tp 0/1 pp 0/1", BLOCK)
    assert line.block_bytes == 2 * BLOCK * HEADS * DIM * 4
    assert places(line) == [[0, 1]]  # the third is not full
    assert [len(one) for one in line.groups[0].layers.values()] == [32, 32]


def test_a_full_last_block_counts(path: Path) -> None:
    worker(path).sends([5, 2, 6], 12)
    assert places(lines(path)[0]) == [[0, 1, 2]]


def test_chunks_are_one_request(path: Path) -> None:
    made = worker(path)
    made.sends([5, 2, 6], 12)
    made.sends([5, 2, 6], 12, chunk=3)
    whole, chunked = lines(path)
    assert whole == chunked


def test_a_digest_is_that_of_the_block_and_not_of_its_id(path: Path) -> None:
    caches = random_caches(*SHAPE, seed=1)
    for tensor in caches.values():
        tensor.array[3] = tensor.array[5]
    made = Worker(path, caches)
    made.sends([5, 2], 8)
    made.sends([3, 2], 8)
    made.sends([2, 5], 8)
    one, same, other = lines(path)
    assert one == same
    assert one.groups != other.groups


def test_what_the_decoder_has_is_left_out(path: Path) -> None:
    worker(path).receives([5, 2, 6], 12, held=BLOCK)
    (line,) = lines(path)
    assert (line.side, line.transfer) == ("received", "t")
    assert places(line) == [[1, 2]]


def test_what_is_not_wholly_in_a_window_is_left_out(path: Path) -> None:
    windows = dict.fromkeys(random_caches(*SHAPE, seed=1), 6)
    made = worker(path, windows=windows)
    made.receives([0, 2, 6, 7], 14)  # of the five tokens before the end, those of block 2 in part
    made.receives([0, 2, 6, 7], 16)
    assert [places(line) for line in lines(path)] == [[[3]]]


def test_groups_have_their_own_blocks(path: Path) -> None:
    names = list(random_caches(*SHAPE, seed=1))
    made = worker(path, groups={names[0]: 0, names[1]: 1}, windows={names[1]: 9})
    made.receives([5, 2, 6], 12)
    (line,) = lines(path)
    assert [(group.blocks, list(group.layers)) for group in line.groups] == [
        ([0, 1, 2], names[:1]),
        ([1, 2], names[1:]),
    ]


def test_null_blocks_have_no_kv(path: Path) -> None:
    worker(path).sends([0, 2, 6], 12)
    assert places(lines(path)[0]) == [[1, 2]]


def test_the_schedulers_blocks_may_be_several_of_the_cache(path: Path) -> None:
    made = worker(path, block=2 * BLOCK)
    made.sends([3, 1], 14)
    plain = worker(path)
    plain.sends([6, 7, 2, 3], 14)
    several, one = lines(path)
    assert places(several) == [[0, 1, 2]]
    assert several.groups == one.groups


def test_a_prompt_without_a_whole_block_is_left_out(path: Path) -> None:
    worker(path).sends([5], BLOCK - 1)
    assert not path.exists()


def test_what_was_not_sent_whole_is_left_out(path: Path) -> None:
    made = worker(path)
    made.begins()
    made.computes([5, 2], 0, 4, 8)
    made.digests.sent(["p"])
    made.begins()
    made.computes([5, 2], 0, 4, 8)
    made.digests.begin_step(StepPlan(cancelled=["p"]))
    made.digests.sent(["p", "unknown"])
    assert lines(path) == []


def test_one_that_is_cancelled_when_all_has_left_counts(path: Path) -> None:
    made = worker(path)
    made.begins()
    made.computes([5, 2], 0, 8, 8)
    made.digests.begin_step(StepPlan(cancelled=["p"]))
    made.digests.sent(["p"])
    (line,) = lines(path)
    assert places(line) == [[0, 1]]


def test_of_a_preempted_request_the_last_attempt_counts(path: Path) -> None:
    made = worker(path)
    made.begins()
    made.computes([1, 3], 0, 4, 8)
    made.begins(2)
    made.computes([5, 2], 0, 8, 8)
    made.digests.sent(["p"])
    made.sends([5, 2], 8)
    again, alone = lines(path)
    assert (again.attempt, alone.attempt) == (2, 1)
    assert places(again) == [[0, 1]]


def test_one_that_may_have_been_sent_twice_says_nothing(path: Path) -> None:
    made = worker(path)
    for attempt in (1, 2, 3):
        made.begins(attempt)
        made.computes([5, 2], 0, 4 if attempt == 2 else 8, 8)
    made.digests.sent(["p"])
    assert lines(path) == []


def test_what_failed_or_is_not_wanted_is_left_out(path: Path) -> None:
    made = worker(path)
    made.places([5, 2], 8)
    made.digests.received([Ended("d", frozenset({5, 2}), is_failed=True), Ended("unknown")])
    made.places([5, 2], 8)
    made.digests.begin_step(StepPlan(given_up=[GivenUp("t", "aborted")]))
    made.digests.received([Ended("d")])
    assert lines(path) == []


def test_a_file_that_cannot_be_written_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = worker(tmp_path / "missing" / "digests.jsonl")
    made.sends([5, 2], 8)
    made.sends([5, 2], 8)
    assert caplog.text.count("no more digests") == 1


def test_there_is_a_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "MAX_FILE_BYTES", 700)
    made = worker(path)
    for _ in range(9):
        made.sends([5, 2], 8)
    assert len(lines(path)) == 1


@pytest.mark.parametrize("text", ["{}\n", '{"kv_digests":1,"side":"sent"}\n', "no json\n"])
def test_other_files_are_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(InvalidUsage, match="line 1"):
        lines(path)


def test_a_file_of_too_deep_or_too_long_a_line_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(digests.MARK + b'"deep":' + b"[" * 100_000 + b"\n")
    with pytest.raises(InvalidUsage, match="line 1: "):
        lines(path)
    monkeypatch.setattr(digests, "MAX_FILE_BYTES", 1000)
    path.write_bytes(b" " * 1001)
    with pytest.raises(InvalidUsage, match="line 1: over 1000 bytes"):
        lines(path)


def test_a_line_that_is_cut_off_is_left_out(path: Path) -> None:
    worker(path).sends([5, 2], 8)
    path.write_bytes(path.read_bytes() * 2 + path.read_bytes()[:-5])
    assert len(lines(path)) == 2


def test_workers_write_both_sides(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_DIGESTS", str(path))
    prefill, decode = FakeEngine("send"), FakeEngine("receive", block_size=64, num_blocks=12)
    try:
        here = request("d", receive_params("t"), num_prompt_tokens=100)
        decode.scheduler.allocated(here, blocks([5, 3]), 99)
        decode.step()
        made = request("p", send_params("t", decode.addresses), num_prompt_tokens=100)
        table = list(range(2, 9))
        prefill.scheduler.allocated(made, blocks(table), 0)
        prefill.step(step(new={"p": (table, 0, 100)}), [(1, table, range(100))])
        decode.until(lambda: bool(decode.received), "the decoder heard nothing")
        assert [line.side for line in lines(path)] == ["received"]
        prefill.scheduler.finished(made)
        prefill.step(ended=["p"])
        prefill.until(lambda: prefill.sent == ["p"], "the blocks were not given back")
    finally:
        prefill.close()
        decode.close()
    received, sent = lines(path)
    assert (received.transfer, places(received)) == ("t", [[0]])
    assert (sent.transfer, places(sent)) == ("t", [[0, 1, 2, 3, 4, 5]])


def test_weights_are_odd_and_all_different() -> None:
    made = weights(5000)
    assert made.shape == (2, 5000)
    assert len(np.unique(made)) == made.size
    assert (made & 1).all()
    assert weights(10)[0].tolist() == made[0, :10].tolist()  # the same in every process


LAYOUTS = {
    "flash": ((8, 2, BLOCK, HEADS, DIM), np.float32, None),
    "flash, bfloat16": ((8, 2, BLOCK, HEADS, DIM), np.int16, "bfloat16"),
    "flash, fp8": ((8, 2, BLOCK, HEADS, DIM), np.int8, "float8_e4m3fn"),
    "K and V apart": ((2, 8, BLOCK, HEADS, DIM), np.float16, None),
    "side by side": ((8, HEADS, BLOCK, 2 * DIM), np.float32, None),
    "latents": ((8, BLOCK, 2 * DIM + 2), np.float32, None),
    "latents of odd bytes": ((8, BLOCK - 1, 5), np.int8, None),
    "latents of even bytes": ((8, BLOCK - 1, 5), np.float16, None),
}


def part_of(shape: Sequence[int]) -> ModelPart:
    """A model whose only layer has this cache."""
    if len(shape) == 3:
        return ModelPart(1, 1, shape[1], is_mla=True)
    return ModelPart(1, shape[3] if len(shape) == 5 else HEADS, shape[2])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_torch_gives_these_sums(name: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from kvxfer.connectors.vllm import page_sums

    shape, dtype, view = LAYOUTS[name]
    (tensor,) = random_caches(*shape, seed=3, num_layers=1, dtype=dtype).values()
    tensor.dtype = f"torch.{view or np.dtype(dtype).name}"
    real = torch.from_numpy(tensor.array)
    if view:
        real = real.view(getattr(torch, view))
    if order == "hnd" and len(shape) == 5:
        # Heads before tokens in memory; vLLM's axes stay as they are.
        tensor = tensor.permute(0, 1, 3, 2, 4)
        real = real.permute(0, 1, 3, 2, 4)
    part = part_of(tensor.shape)
    caches = map_caches({"model.layers.0.attn": tensor}, part)
    (array,) = map_caches({"model.layers.0.attn": real}, part).arrays
    ids = np.array([7, 0, 3, 3], np.int64)
    monkeypatch.setattr(page_sums, "_CHUNK_BYTES", 3 * caches.layout.block_bytes)
    sums = page_sums.PageSums(caches.layout)
    found = sums.of(array, ids)
    expected = NumpySums(caches.layout).of(caches.arrays[0], ids)
    assert found.tolist() == expected.tolist()
    assert sums.taken([found, found[:1]]) == NumpySums(caches.layout).taken(
        [expected, expected[:1]]
    )


def test_a_change_anywhere_in_a_block_is_seen() -> None:
    """Every bit of a small page, two places that change, and two that trade places."""
    layout = KVLayout(1, 1, head_dim=4, dtype="bfloat16", block_size=2, kv="packed")  # type: ignore[arg-type]
    (tensor,) = random_caches(1, 2, 2, 1, 4, seed=9, num_layers=1, dtype=np.int16).values()
    sums, block = NumpySums(layout), np.zeros(1, np.int64)
    raw = tensor.array.reshape(-1).view(np.uint8)
    seen = {tuple(sums.of(tensor, block)[0])}
    for bit in range(8 * raw.size):
        raw[bit // 8] ^= 1 << bit % 8
        seen.add(tuple(sums.of(tensor, block)[0]))
        raw[bit // 8] ^= 1 << bit % 8
    signs = 0
    for one in range(3, raw.size, 4):  # the highest bits of two words
        for other in range(3, one, 4):
            raw[[one, other]] ^= 0x80
            seen.add(tuple(sums.of(tensor, block)[0]))
            raw[[one, other]] ^= 0x80
            signs += 1
    words = raw.view(np.int32)
    words[[0, 5]] = words[[5, 0]]
    seen.add(tuple(sums.of(tensor, block)[0]))
    assert len(seen) == 1 + 8 * raw.size + signs + 1


def test_a_block_that_is_not_there_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from kvxfer.connectors.vllm import page_sums

    layout = KVLayout(1, 1, head_dim=8, dtype="float32", block_size=2)
    array = torch.zeros(2, 4, 2, 1, 8)
    for bad in (4, -1):
        with pytest.raises(InvalidUsage, match="that has 4"):
            page_sums.PageSums(layout).of(array, np.array([bad], np.int64))


def test_words_divide_pages() -> None:
    assert [word_bytes(size) for size in (64, 6, 7)] == [4, 2, 1]
