"""Memory of another process: every byte where it belongs, however far into an allocation."""

import random

import pytest
from cache_content import shape
from cuda_driver import free_bytes
from gpu_needs import require_memory
from gpu_pairs import LOCAL_SEED, DeviceChild, linked_devices

from kvxfer.transport import Tuning

# One array a plane, and guards between them: an offset that gets lost shows at once.
FOUR_ARRAYS = shape(num_arrays=4)
ALL_BLOCKS = list(range(16))
REVERSED = ALL_BLOCKS[::-1]
# `cuda-each` are four allocations so small that the driver packs them into one.
MEMORIES = ("cuda", "cuda-each", "vmm", "torch", "torch-each", "cupy-each")


@pytest.mark.parametrize("memory", MEMORIES)
def test_each_array_is_written_where_it_lies(child: DeviceChild, memory: str) -> None:
    require_memory(memory)
    with linked_devices(child, FOUR_ARRAYS, memory=memory) as pair:
        pair.put(ALL_BLOCKS, REVERSED)
        pair.check()


@pytest.mark.parametrize("memory", MEMORIES)
def test_each_array_is_read_where_it_lies(child: DeviceChild, memory: str) -> None:
    require_memory(memory)
    with linked_devices(child, FOUR_ARRAYS, memory=memory) as pair:
        pair.get(ALL_BLOCKS, REVERSED)
        pair.check()


@pytest.mark.parametrize(("near", "far"), [("cuda", "vmm"), ("vmm", "cuda"), ("cuda", "torch")])
def test_the_two_sides_need_not_allocate_alike(child: DeviceChild, near: str, far: str) -> None:
    require_memory(far)
    with linked_devices(child, FOUR_ARRAYS, memory=far, local_memory=near) as pair:
        pair.put([0, 1, 2, 3], [15, 9, 0, 4])
        pair.check()


def test_the_check_sees_an_offset_that_was_lost(child: DeviceChild) -> None:
    with linked_devices(child, FOUR_ARRAYS) as pair:
        wrong = pair.peer.view.addresses
        wrong.setflags(write=True)
        wrong[:] = wrong[0, 0]  # every array at the first one's place
        pair.put(ALL_BLOCKS, ALL_BLOCKS)
        with pytest.raises(AssertionError, match=r"array \d, plane 0, block"):
            pair.check()


def test_the_path_says_what_carried_the_bytes(child: DeviceChild) -> None:
    with linked_devices(child, FOUR_ARRAYS) as pair:
        assert pair.put([0], [1], tuning=Tuning(engine="dma")) == "same device, copy engine put"
        assert pair.get([0], [1], tuning=Tuning("load_store")) == (
            "same device, load/store kernel get"
        )
        assert pair.peer.link.path == "same device"


MIB = 1 << 20
NUM_LARGE_BLOCKS = 6 << 10
LARGE = {"kv": "mla", "num_layers": 1, "num_kv_heads": 1, "block_size": 1, "dtype": "uint8"}
FAR = shape(num_blocks=NUM_LARGE_BLOCKS, head_dim=MIB, **LARGE)
NEAR = shape(num_blocks=8, head_dim=MIB, **LARGE)
# Both sides of 2^31 and of 2^32 bytes, and the ends.
FAR_IDS = [2047, 2048, 2049, 4095, 4096, 4097, NUM_LARGE_BLOCKS - 1, 0]


@pytest.mark.parametrize("engine", ["bulk", "load_store", "dma"])
def test_blocks_beyond_2_and_4_gib(child: DeviceChild, engine: str) -> None:
    if free_bytes(0) < 8 << 30:
        pytest.skip(reason="less than 8 GiB of GPU memory is free")
    near_ids = list(range(8))
    with linked_devices(child, FAR, NEAR, remote_seed=None) as pair:
        child.call("fill_pattern", seed=5)
        pair.peer.put(near_ids, FAR_IDS, tuning=Tuning(engine=engine)).wait()
        sent = pair.local.digests(near_ids)
        assert len(set(sent)) == 8
        assert child.call("digests", block_ids=FAR_IDS) == sent
        assert child.call("num_wrong_words", seed=5, except_ids=FAR_IDS) == 0

        order = random.Random(1).sample(near_ids, 8)
        pair.peer.get(FAR_IDS, order, tuning=Tuning(engine=engine)).wait()
        pair.local.copied_in(LOCAL_SEED, near_ids, order)
        assert pair.local.problem() == ""


def test_the_check_of_other_blocks_sees_a_single_stray_page(child: DeviceChild) -> None:
    with linked_devices(child, shape(num_blocks=64), shape(num_blocks=8), remote_seed=None) as pair:
        child.call("fill_pattern", seed=5)
        pair.peer.put([0, 1], [7, 9]).wait()
        words = shape().num_planes * shape().page_bytes // 8
        assert child.call("num_wrong_words", seed=5, except_ids=[7]) == words
        assert child.call("num_wrong_words", seed=5, except_ids=[7, 9]) == 0
