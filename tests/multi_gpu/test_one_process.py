"""One process with two GPUs: which is current must not matter, and must not change."""

import threading
from collections.abc import Callable
from typing import Any

import cuda_driver
import pytest
from cache_content import CacheShape, shape
from device_host import DeviceHost
from gpu_needs import array_library
from gpu_pairs import DeviceChild, linked_devices
from peer_process import DEADLINE_S

from kvxfer import Endpoint, KVCache, KVLayout, _core
from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable
from kvxfer.memory import as_buffer
from kvxfer.transport import Tuning

ALL_BLOCKS = list(range(16))
CACHE = shape(num_layers=4, block_size=128)


def open_on(device: int, cache: CacheShape = CACHE, transport: str = "nvlink") -> DeviceHost:
    host = DeviceHost()
    host.open(
        layout=cache.fields,
        num_blocks=cache.num_blocks,
        num_arrays=cache.num_arrays,
        memory="cuda",
        transport=transport,
        seed=1 + device,
        device=device,
    )
    return host


def in_new_thread(work: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("current", [0, 1])
def test_caches_of_both_gpus_from_a_thread_of_one(child: DeviceChild, current: int) -> None:
    opened = child.open(CACHE, memory="cuda", transport="nvlink", seed=7, device=1)

    def work() -> None:
        cuda_driver.make_current(current)
        before = cuda_driver.current_context()
        hosts = [open_on(0), open_on(1)]
        try:
            for device, host in enumerate(hosts):
                assert host.cache.device == device
                with host.endpoint.connect(opened["addresses"]) as peer:
                    half = ALL_BLOCKS[device::2]
                    peer.put(half, half, tuning=Tuning("auto")).wait(DEADLINE_S)
                    peer.get([0], [15]).wait(DEADLINE_S)
                assert cuda_driver.current_context() == before
                child.call("copied_in", src_seed=1 + device, src_ids=half, dst_ids=half)
                # Block 0 is that of GPU 0 by now, on either side.
                host.copied_in(1, [0], [15])
                assert host.problem() == ""
        finally:
            for host in hosts:
                host.close()
        assert cuda_driver.current_context() == before

    try:
        in_new_thread(work)
        assert child.call("problem") == ""
    finally:
        child.call("close")


@pytest.mark.parametrize("current", [0, 1])
def test_the_current_device_of_torch_stays(child: DeviceChild, current: int) -> None:
    torch = array_library("torch")

    def work() -> None:
        torch.cuda.set_device(current)
        for devices in ((0, 1), (1, 0)):
            with linked_devices(child, CACHE, devices=devices) as pair:
                assert torch.cuda.current_device() == current
                pair.put([0, 1], [2, 3])
                assert torch.cuda.current_device() == current
                pair.check()
            assert torch.cuda.current_device() == current
        tensor = torch.zeros(1 << 16, dtype=torch.uint8, device=f"cuda:{1 - current}")
        assert as_buffer(tensor).device == 1 - current
        assert torch.cuda.current_device() == current

    in_new_thread(work)


def test_the_source_order_holds_where_another_device_is_current(child: DeviceChild) -> None:
    torch = array_library("torch")
    with linked_devices(child, CACHE, memory="cuda", local_memory="torch", devices=(1, 0)) as pair:
        stream = torch.cuda.Stream("cuda:1")

        def work() -> None:
            torch.cuda.set_device(0)
            for round_number in range(1, 11):
                result = pair.remote.start(
                    "expect",
                    incarnation=pair.local.endpoint.incarnation,
                    sequence=round_number,
                    round_number=round_number,
                    src_block_ids=ALL_BLOCKS,
                    dst_block_ids=ALL_BLOCKS,
                    timeout_s=DEADLINE_S,
                )
                pair.local.stamp_host_copy(round_number, ALL_BLOCKS)
                staged = torch.from_numpy(pair.local._raw[0]).to("cuda:1")
                cuda_driver.synchronize(1)
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(20_000_000)
                    pair.local.memory[0].owner.copy_(staged)
                assert torch.cuda.current_device() == 0
                pair.peer.put(ALL_BLOCKS, ALL_BLOCKS, after=stream.cuda_stream)
                assert result() == {"signalled": True, "num_stale": 0}

        in_new_thread(work)
        cuda_driver.synchronize(1)


def test_a_stream_of_another_gpu_is_an_error_and_no_transfer(child: DeviceChild) -> None:
    torch = array_library("torch")
    stream = torch.cuda.Stream("cuda:1")
    with linked_devices(child, CACHE, devices=(0, 1)) as pair:
        with pytest.raises(KvxferError, match="cudaEventRecord"):
            pair.peer.put([0], [1], after=stream.cuda_stream)
        assert not pair.signalled(1)
        pair.put([2], [3])
        assert pair.signalled(1)
        assert not pair.signalled(2)
        pair.check()


def test_arrays_of_two_gpus_make_no_cache() -> None:
    layout = KVLayout(2, 1, head_dim=64, dtype="uint8")
    arrays = [_core.DeviceBuffer(device, 1 << 16) for device in (0, 1)]
    with pytest.raises(InvalidUsage, match="array 1 is on device 1, array 0 on device 0"):
        KVCache(layout, arrays)


def test_loopback_does_not_reach_another_gpu() -> None:
    near, far = (open_on(device, transport="loopback") for device in (0, 1))
    try:
        for one, other in ((near, far), (far, near)):
            with pytest.raises(NotAvailable, match="memory of one GPU; use nvlink"):
                one.endpoint.connect(other.endpoint.addresses)
        assert near.problem() == ""
        assert far.problem() == ""
    finally:
        near.close()
        far.close()


def test_loopback_works_on_the_second_gpu() -> None:
    near, far = (open_on(1, transport="loopback") for _ in range(2))
    try:
        with near.endpoint.connect(far.endpoint.addresses) as peer:
            peer.put(ALL_BLOCKS, ALL_BLOCKS[::-1]).wait(DEADLINE_S)
        far.copied_in(2, ALL_BLOCKS, ALL_BLOCKS[::-1])
        assert far.problem() == ""
    finally:
        near.close()
        far.close()


def test_pointers_tell_their_gpu() -> None:
    for device in (0, 1):
        memory = _core.DeviceBuffer(device, 1 << 16)
        assert _core.pointer_info(memory.address).device == device
        cache = KVCache(KVLayout(1, 1, head_dim=64, dtype="uint8"), memory)
        assert cache.device == device
        with Endpoint(cache) as endpoint:
            assert endpoint.transport_name == "nvlink"
        cache.close()
