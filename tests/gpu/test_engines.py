"""Every engine, page size and SM budget, byte for byte, between two processes."""

import random
from functools import cache

import pytest
from cache_content import CacheShape, shape
from gpu_pairs import DeviceChild, linked_devices

from kvxfer import _core
from kvxfer.errors import InvalidUsage
from kvxfer.transport import Tuning

KIB = 1 << 10
# What a path may say of each; auto chooses between the kernels by the size of the request.
ENGINES = {
    "bulk": ["bulk kernel"],
    "load_store": ["load/store kernel"],
    "dma": ["copy engine"],
    "auto": ["bulk kernel", "load/store kernel"],
}
ALIGNED = [16, 48, 512, 2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 100 * KIB, 1024 * KIB]
# Pages whose starts are aligned to 1, 2, 4 and 8 bytes.
UNALIGNED = [21, 1026, 20, 8 * KIB + 4, 24]


def pages_of(page_bytes: int) -> CacheShape:
    """A cache of pages of that size: many, but not more than a test can look at."""
    num_blocks = max(12, min(96, (4 << 20) // page_bytes))
    return shape(
        num_layers=2,
        num_kv_heads=1,
        head_dim=page_bytes,
        block_size=1,
        dtype="uint8",
        kv="mla",
        num_blocks=num_blocks,
    )


def draw(seed: int, cache_shape: CacheShape) -> list[int]:
    """Half of the blocks, in any order."""
    count = cache_shape.num_blocks // 2
    return random.Random(seed).sample(range(cache_shape.num_blocks), count)


@cache
def budgets() -> tuple[int, ...]:
    return 1, 3, 8, 16, _core.device_info(0).num_sms


def check_path(path: str, engine: str, op: str) -> None:
    assert path in [f"same device, {carrier} {op}" for carrier in ENGINES[engine]]


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "bulk" and _core.device_info(0).compute_major < 9:
        pytest.skip(reason="bulk copies need compute capability 9.0")
    return name


every_engine = pytest.mark.parametrize("engine", ENGINES, indirect=True)


@every_engine
@pytest.mark.parametrize("page_bytes", ALIGNED)
def test_put(child: DeviceChild, engine: str, page_bytes: int) -> None:
    pages = pages_of(page_bytes)
    with linked_devices(child, pages) as pair:
        for turn, num_sms in enumerate(budgets()):
            path = pair.put(
                draw(10 + turn, pages), draw(20 + turn, pages), tuning=Tuning(engine, num_sms)
            )
            check_path(path, engine, "put")
            pair.check()


@every_engine
@pytest.mark.parametrize("page_bytes", ALIGNED)
def test_get(child: DeviceChild, engine: str, page_bytes: int) -> None:
    pages = pages_of(page_bytes)
    with linked_devices(child, pages) as pair:
        for turn, num_sms in enumerate(budgets()):
            path = pair.get(
                draw(30 + turn, pages), draw(40 + turn, pages), tuning=Tuning(engine, num_sms)
            )
            check_path(path, engine, "get")
            assert pair.local.problem() == ""
        pair.check()


@pytest.mark.parametrize("page_bytes", UNALIGNED)
def test_unaligned_pages_take_the_load_store_kernel(child: DeviceChild, page_bytes: int) -> None:
    pages = pages_of(page_bytes)
    with linked_devices(child, pages) as pair:
        for turn, (engine, num_sms) in enumerate([("auto", 0), ("load_store", 3), ("dma", 0)]):
            path = pair.put(
                draw(50 + turn, pages), draw(60 + turn, pages), tuning=Tuning(engine, num_sms)
            )
            assert ("copy engine" if engine == "dma" else "load/store kernel") in path
            pair.check()
    with linked_devices(child, pages) as pair:
        assert "load/store kernel" in pair.get(draw(70, pages), draw(80, pages))
        pair.check()


@pytest.mark.parametrize("page_bytes", UNALIGNED)
def test_bulk_refuses_unaligned_pages_and_nothing_happens(
    child: DeviceChild, page_bytes: int
) -> None:
    pages = pages_of(page_bytes)
    with linked_devices(child, pages) as pair:
        for post in (pair.peer.put, pair.peer.get):
            with pytest.raises(InvalidUsage, match=r"16-byte alignment.*use the load/store kernel"):
                post([0, 1], [2, 3], tuning=Tuning(engine="bulk"))
        assert not pair.signalled(1)
        pair.check()
        # The far side counts what was done, not what was refused.
        pair.put([0], [1])
        assert pair.signalled(1)
        assert not pair.signalled(2)


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        (Tuning(engine="memcpy"), "engine 'memcpy' on device memory; use auto, bulk"),
        (Tuning(engine=""), "engine ''"),
        (Tuning(num_sms=100_000), r"num_sms is 100000; this GPU has \d+"),
        (Tuning(num_sms=-1), "num_sms is -1"),
    ],
    ids=str,
)
def test_what_this_gpu_cannot_do_is_refused(
    child: DeviceChild, tuning: Tuning, message: str
) -> None:
    with linked_devices(child) as pair:
        for ids in ([0, 1], []):
            with pytest.raises(InvalidUsage, match=message):
                pair.peer.put(ids, ids, tuning=tuning)
        assert not pair.signalled(1)
        pair.check()


def test_auto_takes_the_copy_engine_for_long_runs_alone(child: DeviceChild) -> None:
    long = shape(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1 << 20,
        block_size=1,
        dtype="uint8",
        kv="mla",
        num_blocks=80,
    )
    run = list(range(64))
    with linked_devices(child, long) as pair:
        assert "copy engine" in pair.put(run, [block + 16 for block in run])
        pair.check()
        every_other = run[::2]
        assert "copy engine" not in pair.put(every_other, every_other)
        pair.check()


def test_auto_takes_bulk_copies_for_large_requests_of_aligned_pages(child: DeviceChild) -> None:
    large = pages_of(100 * KIB)
    with linked_devices(child, large) as pair:
        path = pair.put(draw(1, large), draw(2, large))
        has_bulk = _core.device_info(0).compute_major >= 9
        assert ("bulk kernel" if has_bulk else "load/store kernel") in path
        pair.check()


def test_a_source_may_go_to_several_places(child: DeviceChild) -> None:
    with linked_devices(child, shape()) as pair:
        pair.put([3, 3, 3], [0, 9, 4])
        pair.check()


def test_the_check_sees_one_block_too_many(child: DeviceChild) -> None:
    with linked_devices(child, shape()) as pair:
        pair.peer.put([5], [6]).wait()
        with pytest.raises(AssertionError, match="plane 0, block 6, byte 0"):
            pair.check()
