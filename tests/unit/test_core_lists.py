"""The core's lists of descriptors: what they accept, and what a plan of two of them copies."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kvxfer import _core
from kvxfer.errors import InvalidUsage, NotAvailable

_PAGE = 64


def table(*rows: tuple[int, int, int]) -> Any:
    return np.array(rows, np.uint64).reshape(-1, 3)


def whole(array: Any, shift: int = 0) -> Any:
    start = array.ctypes.data
    return table((start, start + array.nbytes, shift % (1 << 64)))


def pages(array: Any, lengths: Any) -> Any:
    """Descriptors that lie one behind the other from the beginning of ``array``."""
    ends = np.cumsum(lengths)
    found = np.zeros((len(lengths), 3), np.uint64)
    found[:, 0] = array.ctypes.data + (ends - lengths)
    found[:, 1] = lengths
    return found


@pytest.fixture
def memory() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, 1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)


@pytest.mark.parametrize("size", [16, 4096, 24, 6, 7])
@pytest.mark.parametrize("bypass_cache", [False, True])
def test_a_list_of_one_length_is_copied(
    memory: tuple[Any, Any], size: int, bypass_cache: bool
) -> None:
    src, dst = memory
    count = min(src.nbytes // size, 5000)
    lengths = np.full(count, size)
    lists = [_core.DescriptorList(pages(one, lengths), whole(one)) for one in memory]
    rng = np.random.default_rng(size)
    chosen = [rng.permutation(count)[: count // 2] for _ in memory]
    plan = _core.ListPlan(lists[0], chosen[0], lists[1], chosen[1])
    assert plan.num_bytes == count // 2 * size
    assert not plan.looks_up, "nothing lies on a GPU"
    plan.copy_host(_core.WorkerPool(2), bypass_cache)
    wanted = np.zeros(count * size, np.uint8).reshape(count, size)
    wanted[chosen[1]] = src[: count * size].reshape(count, size)[chosen[0]]
    np.testing.assert_array_equal(dst[: count * size], wanted.ravel())
    assert not dst[count * size :].any()


def test_lists_of_many_lengths_are_copied(memory: tuple[Any, Any]) -> None:
    src, dst = memory
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 200, 3000)
    order = rng.permutation(lengths.size)
    lists = (
        _core.DescriptorList(pages(src, lengths), whole(src)),
        _core.DescriptorList(pages(dst, lengths[order]), whole(dst)),
    )
    _core.ListPlan(lists[0], order, lists[1], np.arange(order.size)).copy_host(
        _core.WorkerPool(2), False
    )
    starts = np.cumsum(lengths) - lengths
    wanted = np.concatenate([src[starts[at] : starts[at] + lengths[at]] for at in order])
    np.testing.assert_array_equal(dst[: wanted.size], wanted)
    assert not dst[wanted.size :].any()


def test_a_list_at_a_shift(memory: tuple[Any, Any]) -> None:
    src, dst = memory
    elsewhere = pages(src, np.full(8, _PAGE))
    elsewhere[:, 0] -= np.uint64(1 << 30)
    ranges = whole(src)
    ranges[:, :2] -= np.uint64(1 << 30)
    ranges[:, 2] = 1 << 30
    every = np.arange(8)
    lists = (
        _core.DescriptorList(elsewhere, ranges),
        _core.DescriptorList(pages(dst, np.full(8, _PAGE)), whole(dst)),
    )
    _core.ListPlan(lists[0], every, lists[1], every).copy_host(_core.WorkerPool(1), False)
    np.testing.assert_array_equal(dst[: 8 * _PAGE], src[: 8 * _PAGE])


def test_which_ranges_hold_descriptors() -> None:
    ranges = table((100, 200, 0), (200, 300, 0), (400, 500, 0), (600, 700, 0))
    found = _core.DescriptorList(table((450, 50, 0), (100, 1, 0), (199, 1, 0)), ranges)
    assert len(found) == 3
    assert found.ranges_used == [0, 2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((99, 1, 0), "descriptor 0, 1 bytes at 99, lies in no registered range"),
        ((199, 2, 0), "lies in no"),
        ((150, 0, 0), "has no bytes"),
        ((200, 1, 0), "lies in no"),
        (((1 << 64) - 8, 16, 0), "lies in no"),
        ((150, (1 << 64) - 1, 0), "lies in no"),
    ],
)
def test_a_descriptor_outside_is_refused(row: tuple[int, int, int], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        _core.DescriptorList(table(row), table((100, 200, 0)))
    with pytest.raises(InvalidUsage, match=message.replace("descriptor 0", "descriptor 1")):
        _core.DescriptorList(table((100, 8, 0), row), table((100, 200, 0)))


@pytest.mark.parametrize(
    "ranges",
    [table((100, 200, 0), (199, 300, 0)), table((200, 300, 0), (100, 200, 0)), table((5, 5, 0))],
)
def test_ranges_in_disorder_are_refused(ranges: Any) -> None:
    with pytest.raises(InvalidUsage, match="overlaps"):
        _core.DescriptorList(table((210, 1, 0)), ranges)


def test_no_descriptors_and_no_ranges_are_refused() -> None:
    with pytest.raises(InvalidUsage, match="0 descriptors"):
        _core.DescriptorList(table(), table((100, 200, 0)))
    with pytest.raises(InvalidUsage, match="no registered range"):
        _core.DescriptorList(table((100, 8, 0)), table())


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([4], [0], "index 4 into a list of 4"),
        ([0], [-1], "index -1 into a list of 4"),
        ([1 << 40], [0], "into a list of 4"),
        ([0, 1], [0], "2 and 1 indices"),
        ([], [], "0 and 0 indices"),
        ([3], [0], "pair 0 has 32 bytes and 16"),
    ],
)
def test_indices_that_do_not_fit_are_refused(src: list[int], dst: list[int], message: str) -> None:
    ranges = table((0x1000, 0x2000, 0))
    sizes = (16, 16, 16, 32)
    made = _core.DescriptorList(
        table(*[(0x1000 + 64 * at, size, 0) for at, size in enumerate(sizes)]), ranges
    )
    with pytest.raises(InvalidUsage, match=message):
        _core.ListPlan(made, np.array(src, np.int64), made, np.array(dst, np.int64))


def test_more_lengths_than_a_transfer_takes_are_refused() -> None:
    ranges = table((0x1000, 0x100000, 0))
    made = _core.DescriptorList(table(*[(0x1000 + at, at, 0) for at in range(1, 258)]), ranges)
    every = np.arange(257)
    _core.ListPlan(made, every[:256], made, every[:256])
    with pytest.raises(InvalidUsage, match="more than 256 different lengths"):
        _core.ListPlan(made, every, made, every)


_HOLDER = """
import sys
import numpy as np
held = np.arange(1 << 16, dtype=np.uint8)
print(held.ctypes.data, flush=True)
sys.stdin.readline()
print(int((held[:4096] == held[4096:8192]).all()), flush=True)
"""


def test_a_list_in_the_private_memory_of_another_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        address = int(child.stdout.readline())
        here = np.zeros(4096, np.uint8)
        far_range = table((address, address + (1 << 16), 0))
        near = _core.DescriptorList(pages(here, np.full(64, _PAGE)), whole(here))
        far = _core.DescriptorList(
            table(*[(address + _PAGE * at, _PAGE, 0) for at in range(128)]), far_range
        )
        first, second = np.arange(64), np.arange(64, 128)
        pool = _core.WorkerPool(2)
        _core.ListPlan(far, first, near, first[::-1].copy()).copy_process_vm(pool, child.pid, False)
        wanted = np.arange(4096).astype(np.uint8).reshape(64, _PAGE)[::-1]
        np.testing.assert_array_equal(here.reshape(64, _PAGE), wanted)
        _core.ListPlan(near, first[::-1].copy(), far, second).copy_process_vm(pool, child.pid, True)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "1\n"


@pytest.mark.skipif(_core.build_info().has_cuda, reason="this build has CUDA")
def test_a_gpu_is_refused_by_a_build_without_cuda() -> None:
    made = _core.DescriptorList(table((0x1000, 16, 0)), table((0x1000, 0x2000, 0)))
    with pytest.raises(NotAvailable, match="no CUDA"):
        made.place_on(0)
