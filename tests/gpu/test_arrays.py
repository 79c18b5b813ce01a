"""Arrays of torch and cupy as caches: what is taken, moved whole, and what is refused with why."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from gpu_needs import array_library

from kvxfer import Endpoint, KVCache, KVLayout, Peer, _core, shared_empty
from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable
from kvxfer.memory import Buffer, MemoryKind, as_buffer

NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_DIM = 12, 4, 2, 16
SHAPE = (2, NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_DIM)  # K and V of one layer


@pytest.fixture(scope="module")
def torch() -> Any:
    return array_library("torch")


@pytest.fixture(scope="module")
def cupy() -> Any:
    return array_library("cupy")


def layout_of(dtype: str, num_layers: int = 1) -> KVLayout:
    return KVLayout(num_layers, NUM_HEADS, head_dim=HEAD_DIM, dtype=dtype, block_size=BLOCK_SIZE)


@contextmanager
def loopback(layout: KVLayout, near: Any, far: Any) -> Iterator[Peer]:
    """Two caches of this process, linked."""
    with (
        KVCache(layout, near) as near_cache,
        KVCache(layout, far) as far_cache,
        Endpoint(near_cache, transport="loopback") as near_end,
        Endpoint(far_cache, transport="loopback") as far_end,
        near_end.connect(far_end.addresses) as peer,
    ):
        yield peer


# KVLayout's name of a dtype, and torch's.
TORCH_DTYPES = [
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "float32"),
    ("fp8_e4m3", "float8_e4m3fn"),
    ("fp8_e5m2", "float8_e5m2"),
    ("int8", "int8"),
    ("uint8", "uint8"),
]


def random_tensors(torch: Any, dtype: str, count: int) -> list[Any]:
    itemsize = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    raw = [
        torch.randint(0, 256, (*SHAPE[:-1], HEAD_DIM * itemsize), dtype=torch.uint8, device="cuda")
        for _ in range(count)
    ]
    torch.cuda.synchronize()
    return [one.view(getattr(torch, dtype)) for one in raw]


def bytes_of(torch: Any, tensor: Any) -> Any:
    return tensor.view(torch.uint8).cpu().numpy()


@pytest.mark.parametrize(("dtype", "torch_dtype"), TORCH_DTYPES)
def test_tensors_of_torch(torch: Any, dtype: str, torch_dtype: str) -> None:
    near = random_tensors(torch, torch_dtype, 2)
    far = random_tensors(torch, torch_dtype, 2)
    for tensor in near:
        assert tensor.shape == SHAPE
        buffer = as_buffer(tensor)
        assert (buffer.address, buffer.num_bytes) == (tensor.data_ptr(), tensor.nbytes)
        assert (buffer.kind, buffer.device) == (MemoryKind.DEVICE, 0)
    expected = [bytes_of(torch, tensor) for tensor in far]
    for wanted, source in zip(expected, near, strict=True):
        wanted[:, [5, 0, 7]] = bytes_of(torch, source)[:, [1, 2, 3]]
    with loopback(layout_of(dtype, 2), near, far) as peer:
        peer.put([1, 2, 3], [5, 0, 7]).wait()
        for wanted, tensor in zip(expected, far, strict=True):
            assert np.array_equal(bytes_of(torch, tensor), wanted)
        peer.get([5, 0, 7], [8, 9, 10]).wait()
        for wanted, tensor in zip(expected, near, strict=True):
            assert np.array_equal(bytes_of(torch, tensor)[:, [8, 9, 10]], wanted[:, [5, 0, 7]])


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "uint8"])
def test_arrays_of_cupy(cupy: Any, dtype: str) -> None:
    near, far = (
        cupy.asarray(np.random.default_rng(seed).integers(0, 100, SHAPE).astype(dtype))
        for seed in (1, 2)
    )
    cupy.cuda.Device().synchronize()
    buffer = as_buffer(near)
    assert (buffer.address, buffer.num_bytes) == (near.data.ptr, near.nbytes)
    assert (buffer.kind, buffer.device) == (MemoryKind.DEVICE, 0)
    expected = cupy.asnumpy(far)
    expected[:, [5, 0, 7]] = cupy.asnumpy(near)[:, [1, 2, 3]]
    with loopback(layout_of(dtype), near, far) as peer:
        peer.put([1, 2, 3], [5, 0, 7]).wait()
        assert np.array_equal(cupy.asnumpy(far), expected)


def test_a_slice_of_a_tensor_starts_where_it_does(torch: Any) -> None:
    whole = torch.zeros(4, *SHAPE, dtype=torch.bfloat16, device="cuda")
    for index in range(4):
        assert as_buffer(whole[index]).address == whole.data_ptr() + index * whole[0].nbytes


@pytest.mark.parametrize("cut", ["transposed", "strided", "columns"])
def test_what_is_not_contiguous_is_refused(torch: Any, cupy: Any, cut: str) -> None:
    for whole in (
        torch.zeros(2 * NUM_BLOCKS, 64, dtype=torch.float16, device="cuda"),
        cupy.zeros((2 * NUM_BLOCKS, 64), cupy.float16),
    ):
        array = {"transposed": whole.T, "strided": whole[::2], "columns": whole[:, :32]}[cut]
        with pytest.raises(InvalidUsage, match=r"is not contiguous; pass array\.contiguous"):
            KVCache(layout_of("float16"), array)


def test_a_tensor_with_a_gradient_is_refused(torch: Any) -> None:
    tensor = torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with pytest.raises(InvalidUsage, match=r"carries a gradient; pass tensor.detach"):
        KVCache(layout_of("bfloat16"), tensor)


def test_an_empty_tensor_is_refused(torch: Any) -> None:
    with pytest.raises(InvalidUsage, match="is empty"):
        KVCache(layout_of("bfloat16"), torch.zeros(0, dtype=torch.bfloat16, device="cuda"))


def test_a_misaligned_start_is_refused(torch: Any) -> None:
    layout = layout_of("uint8")
    memory = torch.zeros(NUM_BLOCKS * layout.block_bytes + 64, dtype=torch.uint8, device="cuda")
    for shift in (1, 4, 8):
        with pytest.raises(InvalidUsage, match="not a multiple of 16"):
            KVCache(layout, memory[shift : shift + NUM_BLOCKS * layout.block_bytes])
    with KVCache(layout, memory[16 : 16 + NUM_BLOCKS * layout.block_bytes]) as cache:
        assert cache.num_blocks == NUM_BLOCKS


def test_pinned_tensors_are_host_memory(torch: Any) -> None:
    near, far = (torch.full(SHAPE, value, dtype=torch.float16).pin_memory() for value in (1, 2))
    with loopback(layout_of("float16"), near, far) as peer:
        peer.put([1], [2])
    assert float(far[0, 2].sum()) == BLOCK_SIZE * NUM_HEADS * HEAD_DIM
    with KVCache(layout_of("float16"), near) as cache:
        assert cache.device == -1
        with Endpoint(cache) as endpoint:
            assert endpoint.transport_name == "shm"
        with pytest.raises(InvalidUsage, match="this buffer is host memory: use shm"):
            Endpoint(cache, transport="nvlink")


def test_host_memory_over_nvlink_is_refused() -> None:
    for array in (np.zeros(4096, np.uint8), shared_empty(4096)):
        with (
            KVCache(KVLayout(1, 1, head_dim=64, dtype="uint8"), array) as cache,
            pytest.raises(InvalidUsage, match=r"nvlink moves device memory.*use shm"),
        ):
            Endpoint(cache, transport="nvlink")


def device_cache(num_bytes: int = 1 << 16, device: int | None = None) -> KVCache:
    memory = _core.DeviceBuffer(0, num_bytes)
    layout = KVLayout(1, 1, head_dim=64, dtype="uint8")
    if device is None:
        return KVCache(layout, memory)
    return KVCache(layout, Buffer(memory.address, num_bytes, MemoryKind.DEVICE, device, memory))


def test_device_memory_over_shm_is_refused() -> None:
    with (
        device_cache() as cache,
        pytest.raises(InvalidUsage, match="on CUDA device 0: use the nvlink transport"),
    ):
        Endpoint(cache, transport="shm")


def test_auto_takes_nvlink_for_device_memory() -> None:
    with device_cache() as cache, Endpoint(cache) as endpoint:
        assert endpoint.transport_name == "nvlink"


def test_host_and_device_memory_do_not_link() -> None:
    host = np.zeros(1 << 16, np.uint8)
    with device_cache() as on_device, KVCache(on_device.layout, host) as on_host:
        with (
            Endpoint(on_device, transport="nvlink") as near,
            Endpoint(on_host) as far,
            pytest.raises(NotAvailable, match=r"serves shm.*; the peer offers nvlink"),
        ):
            near.connect(far.addresses)
        with (
            Endpoint(on_device, transport="loopback") as near,
            Endpoint(on_host, transport="loopback") as far,
        ):
            for one, other in ((near, far), (far, near)):
                with pytest.raises(NotAvailable, match="loopback joins"):
                    one.connect(other.addresses)


def test_host_and_device_arrays_make_no_cache() -> None:
    layout = KVLayout(2, 1, head_dim=64, dtype="uint8")
    arrays = [_core.DeviceBuffer(0, 1 << 16), np.zeros(1 << 16, np.uint8)]
    with pytest.raises(InvalidUsage, match="array 1 is on host -1, array 0 on device 0"):
        KVCache(layout, arrays)


def test_a_device_that_is_not_there_is_refused() -> None:
    device = _core.device_count()
    with (
        device_cache(device=device) as near,
        device_cache(device=device) as far,
        Endpoint(near, transport="loopback") as near_end,
        Endpoint(far, transport="loopback") as far_end,
        pytest.raises(KvxferError, match="invalid device ordinal"),
    ):
        near_end.connect(far_end.addresses)


def test_a_handle_is_not_opened_in_its_own_process() -> None:
    with (
        device_cache() as near,
        device_cache() as far,
        Endpoint(near, transport="nvlink") as near_end,
        Endpoint(far, transport="nvlink") as far_end,
        pytest.raises(NotAvailable, match=r"cannot be opened in the process.*use loopback"),
    ):
        near_end.connect(far_end.addresses)


def test_loopback_moves_device_memory(torch: Any) -> None:
    near, far = random_tensors(torch, "bfloat16", 2)
    wanted = bytes_of(torch, near)[:, [4]]
    with loopback(layout_of("bfloat16"), near, far) as peer:
        transfer = peer.put([4], [11])
        transfer.wait()
        assert transfer.actual_path.startswith("one process, ")
        assert np.array_equal(bytes_of(torch, far)[:, [11]], wanted)
