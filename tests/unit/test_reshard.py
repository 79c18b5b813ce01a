"""Any parallel layout into any other: every destination rank gets exactly its bytes, each once."""

import dataclasses
from itertools import product
from typing import Any

import numpy as np
import pytest
from carry_out import carry_out
from hypothesis import event, given, note, settings
from kv_oracle import compare
from numpy.typing import NDArray
from reshard_cases import TP_SIZES, Case, Model, Side, reshard_cases

from kvxfer.layout import Route


class Memory:
    """All ranks' memory in one array, in which an address is an index."""

    def __init__(self, case: Case) -> None:
        parts = [np.zeros(64, np.uint8)]
        self.src = [self._append(parts, case.source_bytes(rank)) for rank in case.src.ranks]
        self.dst = [self._append(parts, case.destination_bytes(rank)) for rank in case.dst.ranks]
        self.bytes = np.concatenate(parts)
        self.num_writes = np.zeros(len(self.bytes), np.int64)

    @staticmethod
    def _append(parts: list[NDArray[np.uint8]], part: NDArray[np.uint8]) -> int:
        address = sum(map(len, parts))
        parts.append(part)
        return address

    def part(self, side: Side, rank: int, address: int) -> slice:
        return slice(address, address + side.num_bytes(rank))


def run(case: Case) -> Memory:
    """Every source rank sends to every destination rank."""
    memory, blocks = Memory(case), case.block_map()
    for src_rank, src_address in enumerate(memory.src):
        for dst_rank, dst_address in enumerate(memory.dst):
            src = case.src.view(src_rank, src_address)
            dst = case.dst.view(dst_rank, dst_address)
            made = Route(src, dst, **case.options).plan(blocks)
            written = carry_out(made, memory.bytes)
            assert made.total_bytes == len(written)
            memory.num_writes[written] += 1
    return memory


def check(case: Case, memory: Memory) -> None:
    allowed = np.zeros_like(memory.num_writes)
    for rank, address in enumerate(memory.dst):
        cache, part = case.dst.caches[rank], memory.part(case.dst, rank, address)
        compare(cache, memory.bytes[part], case.expected_bytes(rank))
        allowed[part] = case.expected_writes(rank)
    wrong = np.flatnonzero(memory.num_writes != allowed)
    assert not wrong.size, (
        f"byte {wrong[0]} is written {memory.num_writes[wrong[0]]} times, not {allowed[wrong[0]]}"
    )


@settings(max_examples=300)
@given(reshard_cases())
def test_every_rank_gets_exactly_its_bytes(case: Case) -> None:
    note(str(case))
    event(f"scales {case.scales}")
    check(case, run(case))


def fixed_case(src_tp: int, dst_tp: int, **model: Any) -> Case:
    """A prefix of one token, a partial last block, other axes and blocks at either side."""
    shape = Model(**{"num_layers": 3, "num_heads": 8, "head_dim": 2} | model)
    kinds = ("mla", "mla") if shape.mla else ("split", "head_packed")
    src = Side(shape, "bfloat16", src_tp, (1, 3), kinds[0], "nhd", 2, 6, (5, 0, 3, 2))
    dst = Side(shape, "bfloat16", dst_tp, 1, kinds[1], "hnd", 3, 4, (2, 0, 3))
    return Case(shape, src, dst, range(1, 8))


@pytest.mark.parametrize("model", [{}, {"num_heads": 2}, {"num_heads": 1, "mla": True}], ids=str)
@pytest.mark.parametrize(("src_tp", "dst_tp"), [*product(TP_SIZES, TP_SIZES)])
def test_every_pair_of_tensor_parallel_sizes(
    src_tp: int, dst_tp: int, model: dict[str, Any]
) -> None:
    case = fixed_case(src_tp, dst_tp, **model)
    check(case, run(case))


# The check, seen to fail.


def test_a_byte_that_a_second_source_writes_is_found() -> None:
    case = fixed_case(2, 2)
    memory = run(case)
    check(case, memory)
    memory.num_writes[memory.dst[1] + np.flatnonzero(case.expected_writes(1))[0]] += 1
    with pytest.raises(AssertionError, match="is written 2 times, not 1"):
        check(case, memory)


@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_byte_written_where_none_belongs_is_found(side: str) -> None:
    case = fixed_case(2, 2)
    memory = run(case)
    unwritten = int(np.argmin(case.expected_writes(0)))
    outside = {"src": memory.src[0], "dst": memory.dst[0] + unwritten}[side]
    memory.num_writes[outside] += 1
    with pytest.raises(AssertionError, match="is written 1 times, not 0"):
        check(case, memory)


def test_a_source_that_does_not_send_is_found() -> None:
    case = fixed_case(2, 2)
    memory = run(dataclasses.replace(case, layers=(0, 2)))
    with pytest.raises(AssertionError, match="layer 1, K, block 0, slot 0, head 0"):
        check(case, memory)
