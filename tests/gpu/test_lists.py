"""Lists of descriptors on a GPU: addresses looked up there, and addresses that come along."""

from collections.abc import Iterator
from typing import Any

import cuda_driver
import numpy as np
import pytest

from kvxfer import _core
from kvxfer.errors import InvalidUsage
from kvxfer.memory import create_segment

_PAGE = 4096
_NUM_PAGES = 2048
_DEADLINE_S = 20.0


class Gpu:
    """Two pools of pages on GPU 0 and a copier."""

    def __init__(self) -> None:
        self.pools = [_core.DeviceBuffer(0, _PAGE * _NUM_PAGES) for _ in range(2)]
        self.flags = create_segment(_core.CompletionBoard.SLOT_BYTES)
        self.copier = _core.DeviceCopier(0, self.flags.address, 1)
        self.sequence = 0
        rng = np.random.default_rng(0)
        self.content = rng.integers(0, 256, (_NUM_PAGES, _PAGE), np.uint8)
        cuda_driver.write(0, self.pools[0].address, self.content.ravel())
        cuda_driver.write(0, self.pools[1].address, np.zeros(self.content.size, np.uint8))

    def lists(self, size: int, *, placed: bool) -> list[Any]:
        """A descriptor of ``size`` bytes at the beginning of each page of both pools."""
        made = []
        for pool in self.pools:
            rows = np.zeros((_NUM_PAGES, 3), np.uint64)
            rows[:, 0] = pool.address + np.arange(_NUM_PAGES, dtype=np.uint64) * _PAGE
            rows[:, 1] = size
            ranges = np.array([[pool.address, pool.address + pool.num_bytes, 0]], np.uint64)
            made.append(_core.DescriptorList(rows, ranges))
            if placed:
                made[-1].place_on(0)
        return made

    def post(self, plan: Any, engine: Any = _core.CopyEngine.AUTO) -> Any:
        self.sequence += 1
        used = plan.post(self.copier, 0, self.sequence, 8, engine)
        assert self.copier.wait(0, self.sequence, _DEADLINE_S)
        return used

    def arrived(self) -> Any:
        found = cuda_driver.read(0, self.pools[1].address, self.content.size)
        return found.reshape(self.content.shape)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    made = Gpu()
    yield made
    del made.copier  # before the flags that it writes


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("count", [1, 150, 160, 161, _NUM_PAGES])
@pytest.mark.parametrize("size", [_PAGE, 1040, 24, 7])
def test_chosen_descriptors_arrive(gpu: Gpu, placed: bool, count: int, size: int) -> None:
    src, dst = gpu.lists(size, placed=placed)
    rng = np.random.default_rng(count)
    chosen = [rng.permutation(_NUM_PAGES)[:count] for _ in range(2)]
    plan = _core.ListPlan(src, chosen[0], dst, chosen[1])
    assert plan.looks_up == (placed and count >= 160)
    gpu.post(plan)
    wanted = np.zeros_like(gpu.content)
    wanted[chosen[1], :size] = gpu.content[chosen[0], :size]
    np.testing.assert_array_equal(gpu.arrived(), wanted)


@pytest.mark.parametrize("engine", [_core.CopyEngine.BULK, _core.CopyEngine.LOAD_STORE])
def test_each_kernel_takes_looked_up_lists(gpu: Gpu, engine: Any) -> None:
    if engine is _core.CopyEngine.BULK and _core.device_info(0).compute_major < 9:
        pytest.skip("the bulk kernel needs sm_90")
    src, dst = gpu.lists(_PAGE, placed=True)
    every = np.arange(_NUM_PAGES)
    plan = _core.ListPlan(src, every, dst, every[::-1].copy())
    for _ in range(70):  # more often than transfers may be in flight
        assert gpu.post(plan, engine) == engine
    np.testing.assert_array_equal(gpu.arrived(), gpu.content[::-1])


def test_the_copy_engine_does_not_look_up(gpu: Gpu) -> None:
    src, dst = gpu.lists(_PAGE, placed=True)
    every = np.arange(_NUM_PAGES)
    with pytest.raises(InvalidUsage, match="cannot look descriptors up"):
        gpu.post(_core.ListPlan(src, every, dst, every), _core.CopyEngine.DMA)
