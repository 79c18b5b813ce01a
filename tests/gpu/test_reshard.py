"""Any parallel layout into any other, by the kernels of one GPU.

The ranks of both sides lie in one memory a side, with gaps that must stay as they are. Head
dimensions are such that all kernels take part: multiples of 16 bytes, and anything else.
"""

from dataclasses import dataclass

import cuda_driver
import numpy as np
import pytest
from copy_boxes import CopyBox, core_tables
from gpu_pairs import RawCopier, RawMemory
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reshard_cases import Case, Limits, reshard_cases

from kvxfer import _core
from kvxfer.errors import InvalidUsage
from kvxfer.layout import Route
from kvxfer.transport.host_copy import plan_tables

POOL_BYTES = 8 << 20
NUM_EXAMPLES = 80
GAP_BYTES = 256
NUM_VALUES = 1 << 16
REFUSALS = ("needs sm_90 and 16-byte alignment", "the copy engine cannot convert")
LIMITS = Limits(head_dims=(1, 3, 8, 16, 32), num_layers=4, max_pairs=24)
ENGINES = (
    _core.CopyEngine.AUTO,
    _core.CopyEngine.BULK,
    _core.CopyEngine.LOAD_STORE,
    _core.CopyEngine.DMA,
)


@dataclass(frozen=True)
class Ranks:
    """All ranks of one side: a memory, and where each begins in it."""

    memory: RawMemory
    offsets: list[int]


def place(memory: RawMemory, parts: list[NDArray[np.uint8]], seed: int) -> Ranks:
    memory.model[:] = np.random.default_rng(seed).integers(0, 256, POOL_BYTES, dtype=np.uint8)
    offsets, at = [], GAP_BYTES
    for part in parts:
        memory.model[at : at + part.size] = part
        offsets.append(at)
        at += -(-part.size // GAP_BYTES) * GAP_BYTES + GAP_BYTES
    assert at <= POOL_BYTES, "make the cases smaller or the pool larger"
    cuda_driver.write(0, memory.address, memory.model)
    return Ranks(memory, offsets)


def fits(engine: _core.CopyEngine, tables: _core.PlanTables, copier: RawCopier) -> bool:
    """Post by ``engine``; False where that engine says that it cannot."""
    try:
        used = copier.run(tables, engine=engine, num_sms=7)
    except InvalidUsage as error:
        if not any(text in str(error) for text in REFUSALS):
            raise
        return False
    assert engine in (_core.CopyEngine.AUTO, used)
    return True


@pytest.fixture(scope="module")
def pools() -> tuple[RawMemory, RawMemory, RawCopier]:
    return RawMemory(POOL_BYTES, seed=1), RawMemory(POOL_BYTES, seed=2), RawCopier()


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=reshard_cases(LIMITS), engine=st.sampled_from(ENGINES))
def test_every_rank_gets_exactly_its_bytes(
    pools: tuple[RawMemory, RawMemory, RawCopier], case: Case, engine: _core.CopyEngine
) -> None:
    note(str(case))
    copier = pools[2]
    src = place(pools[0], [case.source_bytes(rank) for rank in case.src.ranks], seed=3)
    dst = place(pools[1], [case.destination_bytes(rank) for rank in case.dst.ranks], seed=4)
    blocks = case.block_map()
    for src_rank, src_offset in enumerate(src.offsets):
        for dst_rank, dst_offset in enumerate(dst.offsets):
            route = Route(
                case.src.view(src_rank, src.memory.address + src_offset),
                case.dst.view(dst_rank, dst.memory.address + dst_offset),
                **case.options,
            )
            tables = plan_tables(route.plan(blocks))
            if not fits(engine, tables, copier):
                event(f"{engine.name} refused")
                copier.run(tables)
    for rank, offset in enumerate(dst.offsets):
        expected = case.expected_bytes(rank)
        dst.memory.model[offset : offset + expected.size] = expected
    dst.memory.check()
    src.memory.check()


def test_the_oracle_sees_one_rank_too_few(pools: tuple[RawMemory, RawMemory, RawCopier]) -> None:
    memory = pools[1]
    place(memory, [np.zeros(64, np.uint8)], seed=5)
    memory.model[GAP_BYTES] ^= 1
    with pytest.raises(AssertionError, match="1 bytes are wrong, the first at 256"):
        memory.check()


def all_values(dtype: str, scale: float, src_address: int, dst_address: int) -> _core.PlanTables:
    """One run of all 65,536 values of ``dtype``, converted."""
    box = CopyBox(
        first_plane=0, num_planes=1, first_segment=0, num_segments=1, run_bytes=2 * NUM_VALUES
    )
    return core_tables(
        np.array([src_address], np.uint64),
        np.array([dst_address], np.uint64),
        np.zeros((1, 4), np.uint32),
        [box],
        np.array([np.float32(1) / np.float32(scale)], np.float32),
        dtype,
    )


@pytest.mark.parametrize("engine", [_core.CopyEngine.BULK, _core.CopyEngine.LOAD_STORE])
@pytest.mark.parametrize("scale", [1.0, 0.03, 7.0, 2.0**-120])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gpu_converts_as_the_host_does(
    pools: tuple[RawMemory, RawMemory, RawCopier],
    dtype: str,
    scale: float,
    engine: _core.CopyEngine,
) -> None:
    if engine == _core.CopyEngine.BULK and _core.device_info(0).compute_major < 9:
        pytest.skip("the bulk kernel needs sm_90")
    src, dst, copier = pools
    values = np.arange(NUM_VALUES, dtype=np.uint16)
    cuda_driver.write(0, src.address, values.view(np.uint8))
    copier.run(all_values(dtype, scale, src.address, dst.address), engine=engine)
    expected = np.zeros(NUM_VALUES, np.uint8)
    on_host = all_values(dtype, scale, values.ctypes.data, expected.ctypes.data)
    _core.paged_copy_host(_core.WorkerPool(1), on_host, False)
    found = cuda_driver.read(0, dst.address, NUM_VALUES)
    np.testing.assert_array_equal(found, expected)
