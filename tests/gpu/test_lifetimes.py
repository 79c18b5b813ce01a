"""Memory that is freed, allocated anew, closed or left behind by a peer that died."""

import gc
import weakref
from collections.abc import Callable, Iterator

import cuda_driver
import pytest
from cache_content import CacheShape, check_content, shape
from device_host import DeviceHost
from gpu_pairs import DeviceChild, GpuPair, linked_devices
from leaks import check_flat
from peer_process import DEADLINE_S

from kvxfer import Endpoint, KVCache, KVLayout, Peer, _core, register
from kvxfer.errors import InvalidUsage, PeerLost, RegistrationError
from kvxfer.memory import Buffer, MemoryKind

MIB = 1 << 20
ALL_BLOCKS = list(range(16))
CACHE = shape(block_size=1024)  # 4 planes x 16 blocks x 32 KiB


def reopen(child: DeviceChild, cache: CacheShape, memory: str, seed: int) -> dict[str, str]:
    """Free the far cache and allocate another one, often at the same addresses."""
    child.call("close")
    opened = child.open(cache, memory=memory, transport="nvlink", seed=seed)
    addresses: dict[str, str] = opened["addresses"]
    return addresses


@pytest.mark.parametrize("close_first", [True, False], ids=["closed-before", "held"])
@pytest.mark.parametrize("memory", ["cuda", "vmm"])
def test_memory_that_was_freed_is_never_taken_for_the_new(
    child: DeviceChild, memory: str, close_first: bool
) -> None:
    with linked_devices(child, CACHE, memory=memory) as pair:
        pair.put([0], [1])
        pair.check()
        older: list[Peer] = []
        peer = pair.peer
        for seed in range(11, 16):
            if close_first:
                peer.close()
            else:
                older.append(peer)  # its mapping of the freed memory stays
            peer = pair.local.endpoint.connect(reopen(child, CACHE, memory, seed))
            peer.get(ALL_BLOCKS, ALL_BLOCKS).wait()
            pair.local.copied_in(seed, ALL_BLOCKS, ALL_BLOCKS)
            assert pair.local.problem() == ""
            pair.local.fill(1)
            peer.put([5, 6], [7, 9]).wait()
            child.call("copied_in", src_seed=1, src_ids=[5, 6], dst_ids=[7, 9])
            assert child.call("problem") == ""
        for one in older:
            with pytest.raises(PeerLost, match="has closed the cache of this link"):
                one.put([0], [0])
        assert child.call("problem") == ""
        for one in [*older, peer]:
            one.close()


def posts(peer: Peer) -> list[Callable[[], object]]:
    return [
        lambda: peer.put([0], [1]),
        lambda: peer.get([0], [1]),
        lambda: peer.put([], []),
    ]


def check_refuses(pair: GpuPair, error: type[Exception], match: str) -> None:
    for post in posts(pair.peer):
        with pytest.raises(error, match=match):
            post()
    assert pair.local.problem() == ""


def test_a_closed_link_is_refused(child: DeviceChild) -> None:
    with linked_devices(child) as pair:
        pair.put([0], [1])
        pair.peer.close()
        pair.peer.close()
        check_refuses(pair, InvalidUsage, "link is closed; connect again")
        pair.check()


@pytest.mark.parametrize("call", ["close_cache", "close_endpoint", "close"])
def test_what_the_peer_has_closed_is_refused(child: DeviceChild, call: str) -> None:
    with linked_devices(child) as pair:
        pair.put([0], [1])
        child.call(call)
        check_refuses(pair, PeerLost, "has closed the cache of this link; connect again")


def test_closing_waits_for_what_is_in_flight(child: DeviceChild) -> None:
    with linked_devices(child, CACHE) as pair:
        pair.post_faulty(ALL_BLOCKS, ALL_BLOCKS, _core.CopyFault.DELAY_BLOCK_0)
        pair.peer.close()
        assert pair.signalled(1)
        child.call("copied_in", src_seed=1, src_ids=ALL_BLOCKS, dst_ids=ALL_BLOCKS)
        pair.check()


def test_a_transfer_keeps_its_link(child: DeviceChild) -> None:
    with linked_devices(child, CACHE) as pair:
        peer = pair.local.endpoint.connect(pair.opened["addresses"])
        watched = weakref.ref(peer.link)
        transfer = peer.put(ALL_BLOCKS, ALL_BLOCKS)
        peer._alloc.close()  # which says that it was forgotten; the link has nothing to say
        del peer
        gc.collect()
        assert watched() is not None
        transfer.wait(DEADLINE_S)
        del transfer
        gc.collect()
        assert watched() is None
        child.call("copied_in", src_seed=1, src_ids=ALL_BLOCKS, dst_ids=ALL_BLOCKS)
        pair.check()


def test_a_killed_peer_is_lost_and_nothing_crashes() -> None:
    with DeviceChild() as child, linked_devices(child, CACHE) as pair:
        pair.put([0], [1])
        pair.post_faulty(ALL_BLOCKS, ALL_BLOCKS, _core.CopyFault.DELAY_BLOCK_0)
        child.kill()
        check_refuses(pair, PeerLost, str(child.pid))
        child.reap()
        check_refuses(pair, PeerLost, str(child.pid))
        pair.peer.close()
    with DeviceChild() as successor, linked_devices(successor, CACHE) as pair:
        pair.put([0], [1])
        pair.get([3], [2])
        pair.check()


def layout_of(cache: CacheShape) -> KVLayout:
    return KVLayout(**cache.fields)


def test_local_memory_that_was_freed_is_not_used(child: DeviceChild) -> None:
    far = shape()
    with linked_devices(child, far) as pair:
        memory = _core.DeviceBuffer(0, far.array_bytes)
        buffer = Buffer(memory.address, memory.num_bytes, MemoryKind.DEVICE, 0, None)
        with KVCache(layout_of(far), buffer) as cache, Endpoint(cache) as endpoint:
            with endpoint.connect(pair.opened["addresses"]) as peer:
                peer.put([0], [1]).wait()
                del memory
                for post in posts(peer):
                    with pytest.raises(RegistrationError, match="not live device memory"):
                        post()
            with pytest.raises(RegistrationError, match="not live device memory"):
                cache.require_live()


def test_local_memory_that_was_allocated_anew_is_not_used() -> None:
    cache_shape = shape(block_size=16384)  # 32 MiB, an allocation of its own
    memory = _core.DeviceBuffer(0, cache_shape.array_bytes)
    address = memory.address
    buffer = Buffer(address, memory.num_bytes, MemoryKind.DEVICE, 0, None)
    with KVCache(layout_of(cache_shape), buffer) as cache:
        del memory
        successor = _core.DeviceBuffer(0, cache_shape.array_bytes)
        if successor.address != address:
            pytest.skip(reason="the driver gave the new allocation another address")
        with pytest.raises(RegistrationError, match="freed and allocated anew since"):
            cache.require_live()
        with pytest.raises(RegistrationError, match="close the old registration first"):
            register(Buffer(address, buffer.num_bytes, MemoryKind.DEVICE, 0, None))
    with register(successor) as registration:
        registration.require_live()


def test_a_closed_cache_lets_go_of_its_memory_whoever_remembers_it() -> None:
    memory = _core.DeviceBuffer(0, shape().array_bytes)
    watched = weakref.ref(memory)
    cache = KVCache(layout_of(shape()), memory)
    endpoint = Endpoint(cache, transport="nvlink")
    del memory
    assert watched() is not None
    endpoint.close()
    cache.close()
    assert watched() is None
    assert endpoint.cache is cache


def test_memory_that_the_peer_freed_is_not_handed_out(child: DeviceChild) -> None:
    cache = shape()
    local = DeviceHost()
    opened = child.open(cache, memory="cuda", transport="nvlink", seed=2, owned=False)
    args = {"layout": cache.fields, "num_blocks": 16, "num_arrays": 1, "seed": 1}
    local.open(memory="cuda", transport="nvlink", **args)
    try:
        with local.endpoint.connect(opened["addresses"]) as peer:
            peer.reserve("a", 2)
            child.call("free_memory")
            with pytest.raises(RegistrationError, match="not live device memory"):
                peer.reserve("b", 2)
        with pytest.raises(RegistrationError, match="not live device memory"):
            local.endpoint.connect(opened["addresses"])
    finally:
        local.close()
        child.call("close")


def test_a_range_may_be_registered_twice_but_not_overlap() -> None:
    memory = _core.DeviceBuffer(0, 1 << 16)
    part = Buffer(memory.address + 4096, 4096, MemoryKind.DEVICE, 0, memory)
    with register(memory) as first, register(memory) as second:
        first.close()
        second.require_live()
        with pytest.raises(RegistrationError, match="overlaps the registered device memory"):
            register(part)
    register(part).close()


# What stays on the GPU of a peer that comes and goes.

NUM_CYCLES = 300
POOL = shape(block_size=8192, num_blocks=32)  # 4 planes x 32 blocks x 256 KiB = 32 MiB
SLACK_BYTES = 128 * MIB  # four pools: the driver gives memory back in its own time


@pytest.fixture
def near() -> Iterator[DeviceHost]:
    """A cache of one block that links to pools."""
    host = DeviceHost()
    host.open(
        layout=POOL.fields, num_blocks=1, num_arrays=1, memory="cuda", transport="nvlink", seed=1
    )
    yield host
    host.close()


def grown_bytes(cycle: Callable[[], None], num_cycles: int) -> int:
    """What many cycles add to the GPU memory in use by all processes."""
    for _ in range(3):
        cycle()
    before = cuda_driver.free_bytes(0)
    for _ in range(num_cycles):
        cycle()
    gc.collect()
    return before - cuda_driver.free_bytes(0)


def test_300_caches_of_a_peer_leave_no_gpu_memory_behind(
    child: DeviceChild, near: DeviceHost
) -> None:
    def cycle() -> None:
        opened = child.open(POOL, memory="cuda", transport="nvlink", seed=None)
        with near.endpoint.connect(opened["addresses"]) as peer:
            peer.put([0], [31]).wait()
        child.call("close")

    assert grown_bytes(cycle, NUM_CYCLES) < SLACK_BYTES


def test_a_closed_link_keeps_none_of_the_peers_memory(child: DeviceChild, near: DeviceHost) -> None:
    kept: list[Peer] = []

    def cycle() -> None:
        opened = child.open(POOL, memory="cuda", transport="nvlink", seed=None)
        kept.append(near.endpoint.connect(opened["addresses"]))
        kept[-1].close()
        child.call("close")

    assert grown_bytes(cycle, 12) < SLACK_BYTES


def test_the_memory_check_sees_pools_that_stay(near: DeviceHost) -> None:
    kept: list[Peer] = []
    with DeviceChild() as leaky:

        def cycle() -> None:
            opened = leaky.open(POOL, memory="cuda", transport="nvlink", seed=None)
            kept.append(near.endpoint.connect(opened["addresses"]))

        assert grown_bytes(cycle, 8) >= SLACK_BYTES
        for peer in kept:
            peer.close()


def test_links_that_come_and_go_leave_no_descriptor_behind(child: DeviceChild) -> None:
    with linked_devices(child) as pair:
        content = pair.local.shape.content(1)

        def cycle() -> None:
            with pair.local.endpoint.connect(pair.opened["addresses"]) as peer:
                peer.put([], []).wait()

        def both() -> dict[str, int]:
            sides = {"near": pair.local.resources(), "far": child.call("resources")}
            return {
                f"{side} {name}": value
                for side, found in sides.items()
                for name, value in found.items()
            }

        check_flat(both, cycle, num_cycles=30)
        check_content(pair.local.shape, pair.local.content(), content)
