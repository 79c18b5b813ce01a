"""What the CUDA driver is asked for, by one that copies on the CPU and knows both batch calls."""

import ctypes
from typing import Any

import numpy as np
import pytest
from fake_libraries import copy_pages

from kvxfer.errors import CudaError, NotAvailable, TransferTimeout
from kvxfer.layout import CopyBox, CopyPlan
from kvxfer.sweep.peers import cuda_driver
from kvxfer.sweep.peers.library import Ends, Mover, Row
from kvxfer.sweep.peers.registry import row_of
from kvxfer.transport import Op

PAGE_BYTES, NUM_PAGES = 64, 8
STREAM, CONTEXT = 77, 88


class FakeDriver:
    """As ``ctypes.CDLL("libcuda.so.1")``; ``batch`` names the call that it has."""

    def __init__(self, batch: str = "cuMemcpyBatchAsync_v2") -> None:
        self.status = 0
        self.query = [600, 0]
        self.called: list[str] = []
        self.batches: list[tuple[int, list[int]]] = []
        setattr(self, batch, self._batch)
        self.has_fail_index = not batch.endswith("_v2")

        def copy(dst: int, src: int, num_bytes: int, stream: ctypes.c_void_p) -> int:
            assert stream.value == STREAM
            ctypes.memmove(dst, src, num_bytes)
            return self.status

        self.cuMemcpyAsync = copy

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cuMemcpyBatch"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name == "cuStreamCreate":
                arguments[0]._obj.value = STREAM
            if name == "cuStreamQuery":
                return self.query.pop(0)
            return 0

        return call

    def _batch(self, dst: Any, src: Any, sizes: Any, count: Any, *rest: Any) -> int:
        attributes, first, num_attributes, *failed, stream = rest
        assert (len(failed), stream.value) == (self.has_fail_index, STREAM)
        assert (first._obj.value, num_attributes.value) == (0, 1)
        self.batches.append((count.value, list(attributes)))
        columns = [
            np.ctypeslib.as_array(ctypes.cast(one, ctypes.POINTER(ctypes.c_uint64)), (count.value,))
            for one in (dst, src, sizes)
        ]
        copy_pages(*columns)
        return self.status


def two_pools() -> tuple[Any, Any, CopyPlan]:
    src = np.arange(PAGE_BYTES * NUM_PAGES, dtype=np.uint32).view(np.uint8)[
        : PAGE_BYTES * NUM_PAGES
    ]
    dst = np.zeros_like(src)
    ids = np.array([[5, 1, 0, 0], [0, 7, 0, 0], [2, 2, 0, 0]], np.uint32)
    box = CopyBox(0, 1, 0, 3, PAGE_BYTES, PAGE_BYTES, 0, 0, 1, 0, 0, 1, 0, 0, PAGE_BYTES)
    addresses = [np.array([side.ctypes.data], np.uint64) for side in (src, dst)]
    return src, dst, CopyPlan(*addresses, segments=ids, boxes=(box,))


def mover_of(row: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Mover:
    monkeypatch.setattr(cuda_driver, "load_driver", lambda: driver)
    ends = Ends(
        op=Op.PUT,
        near_address=0,
        near_device=0,
        mapped_address=0,
        far_address=0,
        far_device=0,
        num_bytes=PAGE_BYTES * NUM_PAGES,
        page_bytes=PAGE_BYTES,
        num_threads=1,
        contact=b"",
    )
    return row_of(row)[0].connect(ends, Row(row))


ROWS = [
    ("memcpy", "cuMemcpyBatchAsync"),
    ("memcpy-batch", "cuMemcpyBatchAsync"),
    ("memcpy-batch", "cuMemcpyBatchAsync_v2"),
]


@pytest.mark.parametrize(("row", "batch"), ROWS)
def test_every_page_goes_to_its_place(
    monkeypatch: pytest.MonkeyPatch, row: str, batch: str
) -> None:
    driver = FakeDriver(batch)
    src, dst, plan = two_pools()
    with mover_of(row, driver, monkeypatch) as mover:
        transfer = mover.ready(plan)()
        transfer.wait(1.0)
        assert transfer.num_bytes == 3 * PAGE_BYTES
        assert transfer.actual_path == ("cuMemcpyAsync" if row == "memcpy" else batch)
    pages, copied = src.reshape(-1, PAGE_BYTES), dst.reshape(-1, PAGE_BYTES)
    wanted = np.zeros_like(pages)
    wanted[[1, 7, 2]] = pages[[5, 0, 2]]
    assert (copied == wanted).all()
    assert driver.batches == ([] if row == "memcpy" else [(3, [3, 0, 0, 0, 0, 0])])
    assert driver.called[-3:] == [
        "cuStreamSynchronize",
        "cuStreamDestroy_v2",
        "cuDevicePrimaryCtxRelease_v2",
    ]
    assert driver.called.index("cuCtxSetCurrent") < driver.called.index("cuStreamCreate")


@pytest.mark.parametrize(("row", "batch"), ROWS)
def test_a_call_that_fails_is_raised(monkeypatch: pytest.MonkeyPatch, row: str, batch: str) -> None:
    driver = FakeDriver(batch)
    driver.status = 700
    with mover_of(row, driver, monkeypatch) as mover:
        start = mover.ready(two_pools()[2])
        with pytest.raises(CudaError, match="failed with status 700"):
            start()


def test_a_copy_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    driver.query = [600] * 1_000_000
    with mover_of("memcpy", driver, monkeypatch) as mover:
        transfer = mover.ready(two_pools()[2])()
        with pytest.raises(TransferTimeout):
            transfer.wait(0.01)


def test_a_driver_without_batches_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver("cuMemcpyBatchOfAnotherName")
    with pytest.raises(NotAvailable, match=r"came with CUDA 12\.8"):
        mover_of("memcpy-batch", driver, monkeypatch)
