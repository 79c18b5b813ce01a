"""Memory of the virtual memory API: rows of chunks, as PyTorch's expandable segments are."""

from collections.abc import Iterator

import cuda_driver
import pytest
from cache_content import shape
from device_host import DeviceHost
from gpu_needs import array_library
from gpu_pairs import DeviceChild, linked_devices
from leaks import check_flat, num_fds
from peer_process import RemoteError

from kvxfer import Endpoint, KVCache, KVLayout, _core
from kvxfer.errors import RegistrationError
from kvxfer.memory import Buffer, MemoryKind

MIB = 1 << 20
# 4 planes x 16 blocks x 128 KiB = 8 MiB, behind a guard: five chunks of 2 MiB.
LARGE = shape(block_size=4096)
ALL_BLOCKS = list(range(16))
SHUFFLED = [3, 14, 7, 0, 9, 12, 1, 15, 4, 10, 2, 13, 6, 8, 11, 5]


@pytest.fixture
def chunks() -> Iterator[list[cuda_driver.VirtualMemory]]:
    """Whatever a test puts in here is freed."""
    made: list[cuda_driver.VirtualMemory] = []
    yield made
    for one in made:
        one.free()


@pytest.mark.parametrize("op", ["put", "get"])
def test_a_cache_over_several_chunks_moves_whole(child: DeviceChild, op: str) -> None:
    with linked_devices(child, LARGE, memory="vmm") as pair:
        assert child.call("exported") == {"legacy": False, "num_chunks": 5}
        getattr(pair, op)(ALL_BLOCKS, SHUFFLED)
        pair.check()


def test_arrays_in_one_reservation_have_their_own_chunks(child: DeviceChild) -> None:
    arrays = shape(block_size=4096, num_arrays=4)  # 2 MiB and two guards each, so none is aligned
    with linked_devices(child, arrays, memory="vmm") as pair:
        pair.put(ALL_BLOCKS, SHUFFLED)
        pair.check()


def register(memory: cuda_driver.VirtualMemory, begin: int, num_bytes: int) -> None:
    """Export a part of it."""
    buffer = Buffer(memory.address + begin, num_bytes, MemoryKind.DEVICE, 0, memory)
    layout = KVLayout(1, 1, head_dim=num_bytes, dtype="uint8", block_size=1, kv="mla")
    with KVCache(layout, buffer) as cache, Endpoint(cache, transport="nvlink"):
        pass


def test_the_part_of_a_row_is_what_is_exported(chunks: list[cuda_driver.VirtualMemory]) -> None:
    memory = cuda_driver.VirtualMemory(0, 6)
    chunks.append(memory)
    size = memory.chunk_bytes
    for begin, num_bytes, num_chunks, offset in (
        (0, 6 * size, 6, 0),
        (0, size, 1, 0),
        (size, size, 1, 0),
        (size + 4096, size, 2, 4096),
        (2 * size - 16, 32, 2, size - 16),
        (3 * size, 3 * size, 3, 0),
    ):
        exported = _core.IpcExport(memory.address + begin, num_bytes)
        assert exported.legacy_handle == b""
        assert exported.chunk_bytes == [size] * num_chunks
        assert len(set(exported.chunk_fds)) == num_chunks
        assert exported.offset_bytes == offset


def test_chunks_without_a_handle_are_refused_with_the_remedy(
    chunks: list[cuda_driver.VirtualMemory],
) -> None:
    chunks.append(cuda_driver.VirtualMemory(0, 3, exportable=False))
    with pytest.raises(RegistrationError, match=r"without a POSIX .*expandable_segments"):
        register(chunks[0], 0, 6 * MIB)


@pytest.mark.parametrize("hole", [1, 2])
def test_a_hole_in_the_row_is_refused(chunks: list[cuda_driver.VirtualMemory], hole: int) -> None:
    chunks.append(cuda_driver.VirtualMemory(0, 3, hole=hole))
    register(chunks[0], 0, 2 * MIB)
    with pytest.raises(RegistrationError):
        register(chunks[0], 0, 6 * MIB)


def test_more_than_the_row_is_refused(chunks: list[cuda_driver.VirtualMemory]) -> None:
    chunks.append(cuda_driver.VirtualMemory(0, 3))
    with pytest.raises(RegistrationError):
        register(chunks[0], 0, 6 * MIB + 4096)


def test_exports_give_their_descriptors_back(chunks: list[cuda_driver.VirtualMemory]) -> None:
    chunks.append(cuda_driver.VirtualMemory(0, 8))
    check_flat(
        lambda: {"fds": num_fds()}, lambda: register(chunks[0], 4096, 15 * MIB), num_cycles=20
    )


def test_the_descriptor_check_sees_an_export_that_is_kept(
    chunks: list[cuda_driver.VirtualMemory],
) -> None:
    chunks.append(cuda_driver.VirtualMemory(0, 2))
    kept = []
    with pytest.raises(AssertionError, match="leak over 5 cycles"):
        check_flat(
            lambda: {"fds": num_fds()},
            lambda: kept.append(_core.IpcExport(chunks[0].address, 4 * MIB)),
            num_cycles=5,
            settle_s=0.2,
        )


# 4 planes x 16 blocks x 1 MiB: four of torch's segments of 20 MiB.
OF_TORCH = shape(block_size=32768)


@pytest.mark.parametrize("with_handles", ["1", "0"])
def test_expandable_segments_of_torch_move_whole_or_are_refused(with_handles: str) -> None:
    array_library("torch")
    setting = "expandable_segments:True"
    child = DeviceChild(
        {
            "PYTORCH_CUDA_ALLOC_CONF": setting,
            "PYTORCH_ALLOC_CONF": setting,
            "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": with_handles,
        }
    )
    refusal: RemoteError | None = None
    with child:
        try:
            with linked_devices(child, OF_TORCH, memory="torch", local_memory="cuda") as pair:
                exported = child.call("exported")
                assert not exported["legacy"], "torch did not take expandable segments"
                assert exported["num_chunks"] >= 3
                pair.put(ALL_BLOCKS, SHUFFLED)
                pair.check()
                pair.peer.get(SHUFFLED, ALL_BLOCKS).wait()
                assert pair.local.problem() == ""
        except RemoteError as error:
            refusal = error
    if refusal is not None:
        # Where torch gave its chunks no handle that can travel, the message says what to set.
        assert refusal.kind == "RegistrationError", refusal
        assert "expandable_segments" in str(refusal)


def test_memory_of_a_stream_ordered_pool_is_refused_with_the_remedy() -> None:
    cupy = array_library("cupy")
    with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
        array = cupy.zeros(4 * MIB, cupy.uint8)
    layout = KVLayout(1, 1, head_dim=MIB, dtype="uint8", block_size=1, kv="mla")
    with (
        KVCache(layout, array) as cache,
        pytest.raises(RegistrationError, match=r"cudaMalloc .*not from a stream-ordered pool"),
    ):
        Endpoint(cache, transport="nvlink")


def test_a_refused_export_leaves_nothing_behind(chunks: list[cuda_driver.VirtualMemory]) -> None:
    chunks.append(cuda_driver.VirtualMemory(0, 3, exportable=False))

    def cycle() -> None:
        with pytest.raises(RegistrationError):
            register(chunks[0], 0, 6 * MIB)

    check_flat(lambda: {"fds": num_fds()}, cycle, num_cycles=20)
    host = DeviceHost()
    cache = shape()
    host.open(
        layout=cache.fields, num_blocks=16, num_arrays=1, memory="vmm", transport="nvlink", seed=1
    )
    assert host.exported() == {"legacy": False, "num_chunks": 1}
    host.close()
