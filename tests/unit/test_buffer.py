"""Arrays of any library as address ranges, and everything that is no such array."""

import gc
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_arrays import CUDA, CUDA_HOST, VULKAN, DlpackOnly, FakeCudaArray, FakeTensor, aligned

from kvxfer import _core
from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable
from kvxfer.memory import Buffer, MemoryKind, as_buffer, create_segment, shared_empty

ADDRESS = 0x7F00_0000_0000


def torch_here() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed; it is an optional extra")


@pytest.mark.parametrize(
    "dtype", ["u1", "i1", "<f2", "<f4", ">i8", "c16", "?", "U4", "S3", "M8[ns]", "V12"]
)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3, 5), (1, 4, 1)])
def test_a_numpy_array_of_any_dtype_is_its_bytes(shape: tuple[int, ...], dtype: str) -> None:
    array = np.zeros(shape, dtype)
    found = as_buffer(array)
    assert (found.address, found.num_bytes) == (array.ctypes.data, array.nbytes)
    assert (found.kind, found.device) == (MemoryKind.HOST, -1)
    assert found.end == array.ctypes.data + array.nbytes


def test_a_view_is_its_own_range() -> None:
    array = np.zeros((6, 4, 8), np.float32)
    found = as_buffer(array[2:5])
    assert found.address == array.ctypes.data + 2 * 4 * 8 * 4
    assert found.num_bytes == 3 * 4 * 8 * 4


def test_axes_of_length_one_have_no_stride_to_judge() -> None:
    array = np.zeros((4, 6, 8), np.uint16)
    assert as_buffer(array[1:2, :, :]).num_bytes == 96
    assert as_buffer(array[:1, :1, :]).num_bytes == 16
    assert as_buffer(array[::4]).num_bytes == 96


def broken_views() -> dict[str, Any]:
    array = np.zeros((4, 6, 8), np.uint16)
    return {
        "a column": array[:, :3, :],
        "every second": array[::2],
        "transposed": array.T,
        "Fortran order": np.asfortranarray(array),
        "backwards": array[::-1],
        "broadcast": np.lib.stride_tricks.as_strided(array, (4, 6, 8), (0, 16, 2)),
        "one field": np.zeros(4, [("key", "f4"), ("value", "f4")])["key"],
    }


@pytest.mark.parametrize("name", broken_views())
def test_what_is_not_contiguous_is_refused(name: str) -> None:
    array = broken_views()[name]
    with pytest.raises(InvalidUsage, match=r"of shape \(.*is not contiguous; pass array") as caught:
        as_buffer(array)
    assert "numpy.ndarray" in str(caught.value)
    assert str(array.shape) in str(caught.value)


@pytest.mark.parametrize("name", ["a column", "every second", "backwards"])
def test_what_is_not_contiguous_in_dlpack_is_refused(name: str) -> None:
    with pytest.raises(InvalidUsage, match="is not contiguous"):
        as_buffer(DlpackOnly(broken_views()[name]))


@pytest.mark.parametrize("wrap", [lambda array: array, DlpackOnly], ids=["numpy", "dlpack"])
def test_a_read_only_array_is_refused(wrap: Any) -> None:
    array = np.zeros(16, np.uint8)
    array.setflags(write=False)
    with pytest.raises(InvalidUsage, match=r"of shape \(16,\).*pass a writable array"):
        as_buffer(wrap(array))
    with pytest.raises(InvalidUsage, match="read-only"):
        as_buffer(np.frombuffer(b"\0" * 16, np.uint8))


@pytest.mark.parametrize("wrap", [lambda array: array, DlpackOnly], ids=["numpy", "dlpack"])
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_an_empty_array_is_refused(shape: tuple[int, ...], wrap: Any) -> None:
    with pytest.raises(InvalidUsage, match="is empty; a KV cache needs at least one block"):
        as_buffer(wrap(np.zeros(shape, np.float32)))


def test_a_misaligned_array_is_still_a_range() -> None:
    # Alignment is for those to ask who copy wide words; a range has none.
    found = as_buffer(aligned(33, shift=7))
    assert found.address % 64 == 7
    assert found.num_bytes == 33


@pytest.mark.parametrize("thing", [None, 7, "text", b"bytes", [1, 2], {}, object(), bytearray(8)])
def test_what_is_no_array_is_refused_by_its_type(thing: Any) -> None:
    name = f"{type(thing).__module__}.{type(thing).__qualname__} is not an array"
    with pytest.raises(InvalidUsage, match=f"{name}; pass one with __dlpack__"):
        as_buffer(thing)


def test_an_array_of_objects_is_refused() -> None:
    # Its bytes are addresses of Python objects: a peer that writes them takes the process over.
    with pytest.raises(InvalidUsage, match=r"of shape \(3,\) holds Python objects"):
        as_buffer(np.zeros(3, object))


@pytest.mark.parametrize("data", [None, b"pixels"])
def test_an_interface_without_an_address_is_refused(data: Any) -> None:
    interface = {"shape": (6,), "typestr": "|u1", "version": 3}
    if data is not None:
        interface["data"] = data  # as images give it
    with pytest.raises(InvalidUsage, match="states no address"):
        as_buffer(SimpleNamespace(__array_interface__=interface, shape=(6,)))


def test_dlpack_gives_the_address_with_its_offset() -> None:
    found = as_buffer(FakeTensor(ADDRESS, (3, 5), bits=16, byte_offset=48))
    assert (found.address, found.num_bytes, found.device) == (ADDRESS + 48, 30, -1)
    assert found.kind is MemoryKind.HOST


@pytest.mark.parametrize(
    ("bits", "lanes", "num_bytes"), [(8, 1, 12), (16, 1, 24), (32, 4, 192), (4, 2, 12), (1, 1, 12)]
)
def test_dlpack_items_take_whole_bytes(bits: int, lanes: int, num_bytes: int) -> None:
    assert as_buffer(FakeTensor(ADDRESS, (12,), bits=bits, lanes=lanes)).num_bytes == num_bytes


def test_dlpack_strides_count_in_items() -> None:
    assert as_buffer(FakeTensor(ADDRESS, (2, 3), strides=(3, 1))).num_bytes == 12
    assert as_buffer(FakeTensor(ADDRESS, (1, 3), strides=(99, 1))).num_bytes == 6
    with pytest.raises(InvalidUsage, match="is not contiguous"):
        as_buffer(FakeTensor(ADDRESS, (2, 3), strides=(6, 2)))
    with pytest.raises(InvalidUsage, match="is not contiguous"):
        as_buffer(FakeTensor(ADDRESS, (2, 3), strides=(1, 2)))


def test_dlpack_beyond_4_gib_is_not_cut() -> None:
    assert as_buffer(FakeTensor(ADDRESS, (3, 1 << 32), bits=16)).num_bytes == 3 << 33


def test_dlpack_on_a_gpu_is_taken_without_synchronising() -> None:
    tensor = FakeTensor(ADDRESS, (8,), device=(CUDA, 3))
    found = as_buffer(tensor)
    assert (found.kind, found.device, found.num_bytes) == (MemoryKind.DEVICE, 3, 16)
    assert tensor.streams == [-1]


def test_dlpack_of_pinned_memory_is_host_memory() -> None:
    tensor = FakeTensor(ADDRESS, (8,), device=(CUDA_HOST, 0))
    found = as_buffer(tensor)
    assert (found.kind, found.device) == (MemoryKind.HOST, -1)
    assert tensor.streams == [None]


def test_dlpack_on_another_device_is_refused_by_its_type() -> None:
    with pytest.raises(InvalidUsage, match=r"DLPack type 7; use CPU \(1\) or CUDA \(2\) memory"):
        as_buffer(FakeTensor(ADDRESS, (8,), device=(VULKAN, 0)))


@pytest.mark.parametrize("name", [b"used_dltensor", b"dltensor_versioned", b"", b"something else"])
def test_a_capsule_of_another_name_is_not_read(name: bytes) -> None:
    # Behind it lies another structure, or memory that its owner has given away.
    with pytest.raises(InvalidUsage, match="use one named dltensor, fresh from __dlpack__"):
        as_buffer(FakeTensor(ADDRESS, (8,), capsule_name=name))


@pytest.mark.parametrize("error", [BufferError, TypeError, RuntimeError])
def test_a_producer_that_refuses_is_quoted(error: type[Exception]) -> None:
    class Refusing(FakeTensor):
        def __dlpack__(self, *, stream: Any = None) -> Any:
            raise error("it requires grad")

    with pytest.raises(InvalidUsage, match=r"cannot be shared \(it requires grad\); pass a writ"):
        as_buffer(Refusing(ADDRESS, (8,)))


def test_a_cuda_array_interface_names_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def pointer_info(address: int) -> Any:
        asked.append(address)
        return SimpleNamespace(device=2)

    monkeypatch.setattr(_core, "pointer_info", pointer_info)
    found = as_buffer(FakeCudaArray(ADDRESS, (3, 5), "<f2"))
    assert (found.address, found.num_bytes) == (ADDRESS, 30)
    assert (found.kind, found.device) == (MemoryKind.DEVICE, 2)
    assert asked == [ADDRESS]
    found = as_buffer(FakeCudaArray(ADDRESS, (3, 5), "<f2", strides=(10, 2)))
    assert found.num_bytes == 30
    for fields, message in [
        ({"strides": (20, 4)}, "is not contiguous"),
        ({"data": (ADDRESS, True)}, "is read-only"),
    ]:
        with pytest.raises(InvalidUsage, match=message):
            as_buffer(FakeCudaArray(ADDRESS, (3, 5), "<f2", **fields))
    with pytest.raises(InvalidUsage, match="is empty"):
        as_buffer(FakeCudaArray(0, (3, 0), "<f2"))


def test_a_cuda_array_interface_of_no_gpu_memory_is_refused() -> None:
    # Without a driver there is nobody to ask; with one the address is not a device's.
    with pytest.raises(KvxferError, match=r"no CUDA|driver|not live device memory"):
        as_buffer(FakeCudaArray(np.zeros(64, np.uint8).ctypes.data, (64,), "|u1"))


def test_device_memory_of_a_machine_without_gpu_says_why() -> None:
    if _core.device_count() > 0:
        pytest.skip(reason="this machine has a GPU")
    assert _core.no_device_reason()
    with pytest.raises(KvxferError) as caught:
        _core.DeviceBuffer(0, 1 << 20)
    assert str(caught.value)
    if not _core.build_info().has_cuda:
        assert isinstance(caught.value, NotAvailable)


def test_a_buffer_passes_through() -> None:
    made = as_buffer(np.zeros(8, np.uint8))
    assert as_buffer(made) is made
    assert as_buffer(Buffer(4096, 16, MemoryKind.HOST, -1, None)).end == 4112


def test_a_shared_segment_is_passed_as_its_array() -> None:
    array = shared_empty((2, 8), np.float16)
    assert as_buffer(array).num_bytes == 32
    segment = create_segment(4096)
    assert as_buffer(np.frombuffer(segment, np.uint8)).address == segment.address


@pytest.mark.parametrize("wrap", [lambda array: array, DlpackOnly], ids=["numpy", "dlpack"])
def test_a_buffer_keeps_its_memory_alive(wrap: Any) -> None:
    array = np.zeros(1 << 20, np.uint8)
    alive = weakref.ref(array)
    found = as_buffer(wrap(array))
    del array
    gc.collect()
    assert alive() is not None
    del found
    gc.collect()
    assert alive() is None


# What ran in the child must have worked, and must not have looked for another library's arrays.
_SPY = """
    import sys, numpy as np, kvxfer
    from kvxfer.memory import as_buffer
    layout = kvxfer.KVLayout(2, 1, head_dim=8, dtype="float16", block_size=4)
    caches = [kvxfer.KVCache(layout, np.zeros((4, 8, 64), np.uint8)) for _ in range(2)]
    near, far = (kvxfer.Endpoint(cache, transport="loopback") for cache in caches)
    with near, far, near.connect(far.addresses) as peer:
        peer.put([0, 1], [2, 3])
    try:
        as_buffer([1, 2, 3])
    except ValueError:
        pass
    found = {"torch", "cupy", "tensorflow", "jax"} & set(sys.modules)
    assert not found, found
    print("done")
"""


def run_python(code: str, folder: Path) -> str:
    preamble = f"import sys; sys.path[:0] = {[str(folder)]!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", preamble + textwrap.dedent(code)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder in which torch and cupy are there to be imported, and complain."""
    for name in ("torch", "cupy"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')\n")
    return tmp_path


def test_no_array_library_is_imported(planted: Path) -> None:
    assert run_python(_SPY, planted) == "done\n"


def test_the_check_sees_an_import(planted: Path) -> None:
    code = "try: import torch\nexcept RuntimeError as error: print(error)\n"
    assert run_python(code, planted) == "torch was imported\n"


def test_a_torch_tensor_is_its_bytes() -> None:
    torch = torch_here()
    tensor = torch.zeros((4, 6, 8), dtype=torch.bfloat16)
    found = as_buffer(tensor)
    assert (found.address, found.num_bytes) == (tensor.data_ptr(), 4 * 6 * 8 * 2)
    assert (found.kind, found.device) == (MemoryKind.HOST, -1)
    part = as_buffer(tensor[2])
    assert part.address == tensor.data_ptr() + 2 * 6 * 8 * 2


def test_a_torch_tensor_that_cannot_be_a_range_is_refused() -> None:
    torch = torch_here()
    tensor = torch.zeros((4, 6))
    with pytest.raises(InvalidUsage, match="is not contiguous"):
        as_buffer(tensor.t())
    with pytest.raises(InvalidUsage, match=r"is empty|cannot be shared"):
        as_buffer(torch.zeros(0))
    with pytest.raises(InvalidUsage, match="gradient"):
        as_buffer(torch.zeros(4, requires_grad=True))


def test_a_torch_tensor_lives_as_long_as_its_buffer() -> None:
    torch = torch_here()
    tensor = torch.full((1 << 20,), 7, dtype=torch.uint8)
    found = as_buffer(tensor)
    del tensor
    gc.collect()
    again = torch.zeros(1 << 20, dtype=torch.uint8)
    assert again.data_ptr() != found.address
