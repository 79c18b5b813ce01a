"""Plans that no cache makes: any address, the longest page, and every shape of the bulk kernel."""

import numpy as np
import pytest
from cuda_driver import free_bytes
from gpu_pairs import RawCopier, RawMemory, copy_model, page_tables, words

from kvxfer import _core
from kvxfer.errors import InvalidUsage

ENGINES = [_core.CopyEngine.LOAD_STORE, _core.CopyEngine.DMA, _core.CopyEngine.AUTO]
BLOCKS = [(0, 3000), (3000, 0), (9000, 12000), (12000, 6000)]
needs_bulk = pytest.mark.skipif(  # its reason is below
    _core.device_count() > 0 and _core.device_info(0).compute_major < 9,
    reason="bulk copies need compute capability 9.0",
)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize("shift", [(1, 0), (0, 1), (3, 7), (2, 2), (4, 0), (0, 12), (8, 8), (5, 4)])
def test_addresses_aligned_to_less_than_16_bytes(
    engine: _core.CopyEngine, shift: tuple[int, int]
) -> None:
    src, dst = RawMemory(1 << 16, seed=1), RawMemory(1 << 16, seed=2)
    copier = RawCopier()
    src_shift, dst_shift = shift
    planes = [(src_shift, dst_shift), (32768 + src_shift, 16384 + dst_shift)]
    for page_bytes in (16, 512, 2992, 13, 1, 2999):
        tables = copy_model(src, dst, planes, BLOCKS, page_bytes)
        used = copier.run(tables, engine=engine, num_sms=3)
        if engine == _core.CopyEngine.AUTO:
            assert used == _core.CopyEngine.LOAD_STORE
        dst.check()
        with pytest.raises(InvalidUsage, match="16-byte alignment"):
            copier.post(tables, engine=_core.CopyEngine.BULK)
    src.check()


SHAPES = [
    (1, 2, 512, 1),
    (1, 64, 512, 4),
    (2, 3, 640, 2),
    (4, 6, 8192, 2),
    (8, 3, 8192, 1),
    (16, 3, 4096, 1),
    (16, 7, 1920, 3),
    (3, 5, 14208, 4),
]


@needs_bulk
@pytest.mark.parametrize("bulk_shape", SHAPES, ids=str)
def test_every_shape_of_the_bulk_kernel(bulk_shape: tuple[int, int, int, int]) -> None:
    src, dst = RawMemory(8 << 20, seed=1), RawMemory(8 << 20, seed=2)
    copier = RawCopier()
    warps, stages, slot_bytes, depth = bulk_shape
    copier.native.set_bulk_shape(warps, stages, slot_bytes, depth)
    order = np.random.default_rng(3).permutation(40).tolist()
    for page_bytes in (16, 528, 8192, 40_016, 100 << 10):
        blocks = [(place * page_bytes, order[place] * page_bytes) for place in range(40)]
        planes = [(0, 0), (4 << 20, 4 << 20)]
        for num_sms in (1, 5, 0):
            tables = copy_model(src, dst, planes, blocks, page_bytes)
            used = copier.run(tables, engine=_core.CopyEngine.BULK, num_sms=num_sms)
            assert used == _core.CopyEngine.BULK
            dst.check()
            src.fill(num_sms + page_bytes)


@pytest.mark.parametrize(
    "bulk_shape", [(17, 3, 512, 1), (1, 1, 512, 1), (1, 2, 513, 1), (8, 4, 8192, 1), (2, 2, 512, 2)]
)
def test_a_shape_that_does_not_fit_is_refused(bulk_shape: tuple[int, int, int, int]) -> None:
    copier = RawCopier()
    with pytest.raises(InvalidUsage, match="does not fit"):
        copier.native.set_bulk_shape(*bulk_shape)


LONG_BYTES = (4 << 30) + (64 << 20)
MIB = 1 << 20


def pattern_of(buffer: _core.DeviceBuffer) -> _core.PatternTables:
    """All of a buffer as pages of one vector of 1 MiB."""
    pages = np.arange(LONG_BYTES // MIB, dtype=np.uint64)
    return _core.PatternTables(
        words(buffer.address),
        words(0),
        pages * np.uint64(MIB),
        pages,
        np.ones(pages.size, np.uint32),
        MIB,
        MIB,
        1,
        0,
        MIB,
    )


@pytest.mark.parametrize("engine", [*ENGINES, _core.CopyEngine.BULK], ids=lambda one: one.name)
def test_one_page_longer_than_4_gib(engine: _core.CopyEngine) -> None:
    if free_bytes(0) < 3 * LONG_BYTES:
        pytest.skip(reason="less than 13 GiB of GPU memory is free")
    if engine == _core.CopyEngine.BULK and _core.device_info(0).compute_major < 9:
        pytest.skip(reason="bulk copies need compute capability 9.0")
    src, dst = (_core.DeviceBuffer(0, LONG_BYTES) for _ in range(2))
    _core.pattern_fill_device(0, pattern_of(src), 1)
    _core.pattern_fill_device(0, pattern_of(dst), 2)
    segments = np.zeros((1, 4), np.uint32)
    tables = page_tables(words(src.address), words(dst.address), segments, LONG_BYTES, (0, 0))
    RawCopier().run(tables, engine=engine)
    assert _core.pattern_check_device(0, pattern_of(dst), 1).num_wrong_words == 0
    assert _core.pattern_check_device(0, pattern_of(dst), 2).num_wrong_words == LONG_BYTES // 8


def test_a_plan_of_too_many_pieces_is_refused() -> None:
    memory = RawMemory(1 << 16, seed=1)
    segments = np.zeros((1 << 16, 4), np.uint32)
    planes = np.full(1 << 15, memory.address, np.uint64)
    tables = page_tables(planes, planes, segments, 16, (0, 0))
    copier = RawCopier()
    for _ in range(70):  # more than may be in flight
        with pytest.raises(InvalidUsage, match=r"pieces passes 2\^31; split the transfer"):
            copier.post(tables, engine=_core.CopyEngine.LOAD_STORE)
    # The copier is as good as new.
    target = RawMemory(1 << 16, seed=2)
    copier.run(copy_model(memory, target, [(0, 0)], [(0, 512), (512, 0)], 512))
    target.check()


def test_the_check_sees_a_wrong_byte() -> None:
    src, dst = RawMemory(4096, seed=1), RawMemory(4096, seed=2)
    tables = copy_model(src, dst, [(0, 0)], [(0, 64)], 64)
    RawCopier().run(tables)
    dst.model[70] ^= 1
    with pytest.raises(AssertionError, match="1 bytes are wrong, the first at 70"):
        dst.check()
