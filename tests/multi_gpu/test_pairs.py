"""Two processes, a GPU each: every byte both ways, and which path carried them."""

import random

import pynvml
import pytest
from cache_content import CacheShape, shape
from cuda_driver import synchronize
from gpu_needs import require_memory
from gpu_pairs import DeviceChild, GpuPair, linked_devices
from peer_process import DEADLINE_S, RemoteError

from kvxfer import _core
from kvxfer.errors import PeerLost
from kvxfer.transport import Tuning

BOTH_WAYS = [(0, 1), (1, 0)]
ENGINES = ["auto", "bulk", "load_store", "dma"]
KIB = 1 << 10
ALL_BLOCKS = list(range(16))
MIDDLE = shape(num_layers=4, block_size=128)  # 128 pages of 4 KiB

both_ways = pytest.mark.parametrize("devices", BOTH_WAYS, ids=["0-to-1", "1-to-0"])


def pages_of(page_bytes: int) -> CacheShape:
    return shape(
        num_layers=2,
        num_kv_heads=1,
        head_dim=page_bytes,
        block_size=1,
        dtype="uint8",
        kv="mla",
        num_blocks=max(12, min(96, (4 << 20) // page_bytes)),
    )


def draw(seed: int, cache: CacheShape) -> list[int]:
    return random.Random(seed).sample(range(cache.num_blocks), cache.num_blocks // 2)


def nvlink_joins(first: int, second: int) -> bool:
    """Whether NVML says so, asked without kvxfer."""
    try:
        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByPciBusId(_core.device_info(device).pci_bus_id.encode())
            for device in (first, second)
        ]
        status = pynvml.nvmlDeviceGetP2PStatus(*handles, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        pynvml.nvmlShutdown()
        return bool(status == pynvml.NVML_P2P_STATUS_OK)
    except pynvml.NVMLError as error:
        pytest.skip(f"NVML does not say what joins the GPUs: {error}")


@both_ways
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("page_bytes", [16, 2 * KIB, 16 * KIB, 100 * KIB, 1024 * KIB, 21])
def test_put_and_get(
    child: DeviceChild, devices: tuple[int, int], engine: str, page_bytes: int
) -> None:
    if engine == "bulk" and page_bytes % 16:
        pytest.skip(reason="the bulk kernel refuses unaligned pages")
    pages = pages_of(page_bytes)
    with linked_devices(child, pages, devices=devices) as pair:
        for turn, num_sms in enumerate((1, 8, 132)):
            num_sms = min(num_sms, _core.device_info(devices[0]).num_sms)
            ids = draw(10 + turn, pages), draw(20 + turn, pages)
            pair.put(*ids, tuning=Tuning(engine, num_sms))
        pair.check()
    with linked_devices(child, pages, devices=devices) as pair:
        for turn, num_sms in enumerate((1, 8)):
            ids = draw(30 + turn, pages), draw(40 + turn, pages)
            pair.get(*ids, tuning=Tuning(engine, num_sms))
        pair.check()


@both_ways
def test_the_path_is_read_back(child: DeviceChild, devices: tuple[int, int]) -> None:
    with linked_devices(child, devices=devices) as pair:
        path = pair.put([0], [1])
        if nvlink_joins(*devices):
            assert path.startswith("nvlink, ")
            limit = pair.peer.link.physical_limit_gb_per_s
            assert limit is not None
            assert 10 < limit < 2000
        else:
            assert path.startswith("pcie, ")


@both_ways
@pytest.mark.parametrize("memory", ["cuda-each", "vmm", "torch"])
def test_four_arrays_of_other_memory(
    child: DeviceChild, devices: tuple[int, int], memory: str
) -> None:
    require_memory(memory)
    with linked_devices(
        child, shape(num_arrays=4), memory=memory, local_memory="cuda", devices=devices
    ) as pair:
        pair.put(ALL_BLOCKS, ALL_BLOCKS[::-1])
        pair.check()
    with linked_devices(
        child, shape(num_arrays=4), memory=memory, local_memory="cuda", devices=devices
    ) as pair:
        pair.get(ALL_BLOCKS, ALL_BLOCKS[::-1])
        pair.check()


def race(pair: GpuPair, num_rounds: int, fault: _core.CopyFault | None, engine: str) -> None:
    """As in the tests on one GPU; here the reader has a GPU to itself."""
    native = {"bulk": _core.CopyEngine.BULK, "load_store": _core.CopyEngine.LOAD_STORE}
    for round_number in range(1, num_rounds + 1):
        pair.local.stamp(round_number, ALL_BLOCKS)
        result = pair.remote.start(
            "expect",
            incarnation=pair.local.endpoint.incarnation,
            sequence=round_number,
            round_number=round_number,
            src_block_ids=ALL_BLOCKS,
            dst_block_ids=ALL_BLOCKS,
            timeout_s=DEADLINE_S,
        )
        if fault is None:
            pair.peer.put(ALL_BLOCKS, ALL_BLOCKS, tuning=Tuning(engine))
        else:
            pair.post_faulty(ALL_BLOCKS, ALL_BLOCKS, fault, native[engine])
        outcome = result()
        assert outcome["signalled"]
        num_stale = outcome["num_stale"]
        assert num_stale == 0, f"round {round_number}: {num_stale} stale pages behind the flag"


@pytest.mark.parametrize("engine", ["bulk", "load_store", "dma"])
def test_what_is_signalled_is_visible(child: DeviceChild, engine: str) -> None:
    with linked_devices(child, MIDDLE, devices=(0, 1)) as pair:
        race(pair, 200, None, engine)


@pytest.mark.parametrize("engine", ["bulk", "load_store"])
def test_the_race_looks_at_the_slowest_block(child: DeviceChild, engine: str) -> None:
    with linked_devices(child, MIDDLE, devices=(0, 1)) as pair:
        race(pair, 5, _core.CopyFault.DELAY_BLOCK_0, engine)
    with linked_devices(child, MIDDLE, devices=(0, 1)) as pair:
        with pytest.raises(AssertionError, match=r"round \d+: \d+ stale pages"):
            race(pair, 5, _core.CopyFault.SIGNAL_EARLY, engine)
        synchronize(0)


def test_a_killed_peer_is_lost_and_nothing_crashes(child: DeviceChild) -> None:
    with DeviceChild() as victim, linked_devices(victim, MIDDLE, devices=(0, 1)) as pair:
        pair.put([0], [1])
        pair.post_faulty(ALL_BLOCKS, ALL_BLOCKS, _core.CopyFault.DELAY_BLOCK_0)
        victim.kill()
        victim.reap()
        with pytest.raises(PeerLost, match=str(victim.pid)):
            pair.peer.put([0], [1])
    with linked_devices(child, MIDDLE, devices=(0, 1)) as pair:
        pair.put([0], [1])
        pair.check()


# What a process sees of the GPUs.


def visible(devices: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": devices}


def test_a_gpu_that_this_side_does_not_see_is_refused_with_the_remedy() -> None:
    cache = shape()
    args = {"memory": "cuda", "transport": "nvlink"}
    with DeviceChild(visible("0")) as near, DeviceChild(visible("1")) as far:
        near.open(cache, seed=1, **args)
        opened = far.open(cache, seed=2, **args)
        assert near.call("uuid") != far.call("uuid")
        with pytest.raises(RemoteError) as caught:
            near.call("connect", addresses=opened["addresses"])
        assert caught.value.kind == "NotAvailable"
        for part in (far.call("uuid"), "not visible", "CUDA_VISIBLE_DEVICES"):
            assert part in str(caught.value)
        assert near.call("problem") == ""
        assert far.call("problem") == ""


def test_a_gpu_goes_by_its_uuid_not_by_its_number() -> None:
    cache = shape(num_arrays=4)
    with DeviceChild(visible("1,0")) as far:
        # Its GPU 0 is our GPU 1, and the other way round.
        for near_device, far_device, same in ((0, 0, False), (0, 1, True), (1, 0, True)):
            with linked_devices(far, cache, devices=(near_device, far_device)) as pair:
                assert (far.call("uuid") == pair.local.uuid()) is same
                assert (pair.peer.link.path == "same device") is same
                pair.put(ALL_BLOCKS, ALL_BLOCKS[::-1])
                pair.check()


def test_a_peer_that_sees_only_its_own_gpu_can_be_linked_to() -> None:
    with (
        DeviceChild(visible("1")) as far,
        linked_devices(far, MIDDLE, devices=(0, 0)) as pair,
    ):
        assert pair.peer.link.path != "same device"
        pair.put(ALL_BLOCKS, ALL_BLOCKS[::-1])
        pair.check()
