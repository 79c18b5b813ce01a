"""One rank's cache: which arrays make one, where its planes lie, and what is refused why."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_arrays import CUDA, FakeTensor, aligned

from kvxfer.errors import InvalidUsage, RegistrationError
from kvxfer.layout import KVLayout, KVShard, TPLayout
from kvxfer.memory import KVCache, register, shared_empty

NUM_BLOCKS = 6
ADDRESS = 0x7D00_0000_0000


def layout(kv: str = "split", *, num_layers: int = 3) -> KVLayout:
    """Pages of 64 bytes (packed: 128), 4 tokens a block."""
    return KVLayout(num_layers, 1, head_dim=8, dtype="float16", block_size=4, kv=kv)


def arrays(num_arrays: int, num_bytes: int) -> list[Any]:
    return [aligned(num_bytes) for _ in range(num_arrays)]


# Axes of an array for all layers; the elements of a head come last.
SHAPES = {
    ("split", "nhd"): ("layer", "kv", "block", "token", "head"),
    ("split", "hnd"): ("layer", "kv", "block", "head", "token"),
    ("packed", "nhd"): ("layer", "block", "kv", "token", "head"),
    ("packed", "hnd"): ("layer", "block", "kv", "head", "token"),
    ("head_packed", "nhd"): ("layer", "block", "token", "head", "kv"),
    ("head_packed", "hnd"): ("layer", "block", "head", "token", "kv"),
    ("chunked", "nhd"): ("block", "kv", "layer", "token", "head"),
    ("chunked", "hnd"): ("block", "kv", "layer", "head", "token"),
    ("mla", "nhd"): ("layer", "kv", "block", "token", "head"),
}
GROUPINGS = {"split": (1, 3, 6), "chunked": (1,)}


@pytest.mark.parametrize(("kv", "order"), SHAPES)
def test_every_vector_lies_where_numpy_finds_it(kv: str, order: str) -> None:
    heads = 1 if kv == "mla" else 2
    sizes = {"layer": 3, "kv": 1 if kv == "mla" else 2, "block": NUM_BLOCKS, "token": 4}
    sizes["head"] = heads
    axes = SHAPES[kv, order]
    model = KVLayout(3, heads, head_dim=8, dtype="float16", block_size=4, kv=kv, order=order)
    # Numbered vectors, cut into arrays as an engine has them.
    numbers = np.arange(np.prod(list(sizes.values()))).reshape([sizes[axis] for axis in axes])
    wanted = numbers.transpose([axes.index(axis) for axis in sizes])
    for num_arrays in GROUPINGS.get(kv, (1, 3)):
        made = arrays(num_arrays, numbers.size // num_arrays * 16)
        starts = np.array([array.ctypes.data for array in made])
        with KVCache(model, made) as cache:
            view = cache.view
            assert cache.num_blocks == NUM_BLOCKS
            for index in np.ndindex(wanted.shape):
                layer, vector, block, token, head = index
                array, offset = divmod(int(wanted[index]), numbers.size // num_arrays)
                assert int(starts[array]) + 16 * offset == (
                    int(view.addresses[layer, vector])
                    + block * view.block_stride_bytes
                    + token * view.token_stride_bytes
                    + head * view.head_stride_bytes
                )
                if block == token == head == 0:
                    plane = layer * sizes["kv"] + vector
                    assert cache.planes[plane] == (array, 16 * offset)
            assert len(cache.planes) == 3 * sizes["kv"]
            assert [item.buffer.num_bytes for item in cache.registrations] == [
                array.nbytes for array in made
            ]


def test_the_arrays_hold_the_ranks_part_alone() -> None:
    model = KVLayout(5, 4, head_dim=8, dtype="float16", block_size=4)
    rank = TPLayout(3, 2, pp_size=2, pp_rank=1)
    # 2 of 5 layers; heads 2 and 3 of 4, since the boundary cuts head 2.
    made = [np.zeros((2, NUM_BLOCKS, 4, 2, 8), np.float16) for _ in range(2)]
    with KVCache(model, made, rank=rank) as cache:
        assert cache.shard == KVShard(model, rank)
        assert (cache.shard.layers, cache.shard.heads) == (range(3, 5), range(2, 4))
        assert cache.layout == cache.shard.layout
        assert (cache.layout.num_layers, cache.layout.num_kv_heads) == (2, 2)
        assert cache.num_blocks == NUM_BLOCKS
    with pytest.raises(InvalidUsage, match="5 arrays for 2 layers of 4 planes; pass 1, 2, 4"):
        KVCache(model, [aligned(1024) for _ in range(5)], rank=rank)


@pytest.mark.parametrize("wrap", [lambda array: array, lambda array: [array], lambda a: (a,)])
def test_one_array_may_come_alone_or_in_a_sequence(wrap: Any) -> None:
    array = aligned(6 * NUM_BLOCKS * 64)
    with KVCache(layout(), wrap(array)) as cache:
        assert cache.num_blocks == NUM_BLOCKS


def test_shaped_arrays_of_an_engine_are_planes() -> None:
    made = [np.zeros((2, NUM_BLOCKS, 4, 1, 8), np.float16) for _ in range(3)]
    with KVCache(layout(), made) as cache:
        for layer, array in enumerate(made):
            key, value = cache.view.addresses[layer]
            assert (key, value) == (array[0].ctypes.data, array[1].ctypes.data)


def test_one_layer_of_split_planes_is_one_array_or_two() -> None:
    one_layer = layout(num_layers=1)
    for made in (arrays(1, 2 * NUM_BLOCKS * 64), arrays(2, NUM_BLOCKS * 64)):
        with KVCache(one_layer, made) as cache:
            assert (cache.num_blocks, len(cache.planes)) == (NUM_BLOCKS, 2)
    message = r"3 arrays for 1 layers of 2 planes; pass 1, 2 \(whole model, one a plane\)"
    with pytest.raises(InvalidUsage, match=message):
        KVCache(one_layer, arrays(3, NUM_BLOCKS * 64))


def test_a_segment_may_hold_the_cache() -> None:
    with KVCache(layout(), shared_empty((6, NUM_BLOCKS, 64))) as cache:
        assert cache.num_blocks == NUM_BLOCKS
        assert cache.device == -1


def test_a_cache_of_more_than_4_gib_is_not_cut() -> None:
    big = KVLayout(4, 8, head_dim=128, dtype="bfloat16", block_size=16)
    num_blocks = 80_000
    tensors = [FakeTensor(ADDRESS + (index << 36), (2 * num_blocks, 16384)) for index in range(4)]
    with KVCache(big, tensors) as cache:
        assert cache.num_blocks == num_blocks
        last = int(cache.view.addresses[3, 1])
        assert last == ADDRESS + (3 << 36) + num_blocks * 32768


@pytest.mark.parametrize("num_arrays", [0, 2, 4, 5, 7])
def test_another_number_of_arrays_is_refused(num_arrays: int) -> None:
    message = (
        f"{num_arrays} arrays for 3 layers of 6 planes; pass 1, 3, 6 (whole model, one a layer, "
        "one a plane)"
    )
    with pytest.raises(InvalidUsage, match=re.escape(message)):
        KVCache(layout(), arrays(num_arrays, 6 * NUM_BLOCKS * 64))


@pytest.mark.parametrize(
    ("kv", "passes"),
    [("chunked", "pass 1 (whole model)"), ("head_packed", "pass 1, 3 (whole model, one a layer)")],
)
def test_an_array_a_plane_needs_planes(kv: str, passes: str) -> None:
    with pytest.raises(InvalidUsage, match=re.escape(passes)):
        KVCache(layout(kv), arrays(6, NUM_BLOCKS * 64))


@pytest.mark.parametrize(("num_bytes", "num_arrays"), [(63, 6), (65, 6), (64 * 7, 3), (383, 1)])
def test_parts_of_a_page_are_refused(num_bytes: int, num_arrays: int) -> None:
    planes = 6 // num_arrays
    message = (
        f"an array of {num_bytes} bytes is not {planes} planes of whole pages; make it a multiple "
        f"of {planes * 64} bytes (64 a page)"
    )
    with pytest.raises(InvalidUsage, match=re.escape(message)):
        KVCache(layout(), arrays(num_arrays, num_bytes))


def test_arrays_of_unequal_size_are_refused() -> None:
    made = [*arrays(2, 2 * NUM_BLOCKS * 64), aligned(2 * (NUM_BLOCKS + 1) * 64)]
    with pytest.raises(InvalidUsage) as caught:
        KVCache(layout(), made)
    for part in ("array 2 has 896 bytes, array 0 has 768", "the same number of blocks"):
        assert part in str(caught.value)


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_a_misaligned_array_is_refused(shift: int) -> None:
    made = [*arrays(2, 2 * NUM_BLOCKS * 64), aligned(2 * NUM_BLOCKS * 64, shift=shift)]
    with pytest.raises(InvalidUsage) as caught:
        KVCache(layout(), made)
    for part in (f"array 2 starts at {made[2].ctypes.data:#x}", "not a multiple of 16", "aligned"):
        assert part in str(caught.value)


def test_a_multiple_of_16_is_aligned_enough() -> None:
    with KVCache(layout(), aligned(6 * NUM_BLOCKS * 64, shift=16)):
        pass


def test_arrays_on_several_devices_are_refused() -> None:
    host = [FakeTensor(ADDRESS + (index << 20), (2, NUM_BLOCKS, 32)) for index in range(2)]
    gpu = [
        FakeTensor(ADDRESS + (index << 20), (2, NUM_BLOCKS, 32), device=(CUDA, index))
        for index in range(3)
    ]
    with pytest.raises(InvalidUsage, match="array 2 is on device 2, array 0 on host -1; keep one"):
        KVCache(layout(), [*host, gpu[2]])
    with pytest.raises(InvalidUsage, match="array 1 is on device 1, array 0 on device 0; keep one"):
        KVCache(layout(), gpu)


def test_one_array_for_two_layers_is_refused() -> None:
    # Shared registrations must not make two planes of one memory.
    first, second = arrays(2, 2 * NUM_BLOCKS * 64)
    for repeated in (first, first[:]):
        with pytest.raises(InvalidUsage) as caught:
            KVCache(layout(), [first, second, repeated])
        start = f"{first.ctypes.data:#x}"
        for part in (f"arrays 0 and 2 both start at {start}", "memory of its own"):
            assert part in str(caught.value)


def grouped(*groups: int, kv: str = "split") -> KVLayout:
    return replace(layout(kv, num_layers=len(groups)), groups=groups)


def test_layers_of_different_groups_may_share_memory_which_is_registered_once() -> None:
    first, second = arrays(2, 2 * NUM_BLOCKS * 64)
    with KVCache(grouped(0, 1, 0, 2), [first, second, second, second]) as cache:
        assert [one.buffer.address for one in cache.registrations] == [
            first.ctypes.data,
            second.ctypes.data,
        ]
        size = NUM_BLOCKS * 64
        assert cache.planes == [(0, 0), (0, size), *[(1, 0), (1, size)] * 3]
        starts = [first.ctypes.data, *[second.ctypes.data] * 3]
        assert cache.view.addresses.tolist() == [[start, start + size] for start in starts]
        assert cache.num_blocks == NUM_BLOCKS
    register(second[:64]).close()  # nothing is left registered


def test_planes_of_different_groups_may_share_memory_too() -> None:
    k, v = arrays(2, NUM_BLOCKS * 64)
    with KVCache(grouped(0, 1), [k, v, v, k]) as cache:
        assert cache.planes == [(0, 0), (1, 0), (1, 0), (0, 0)]


@pytest.mark.parametrize(
    ("groups", "order", "pair"),
    [((0, 1, 0), (0, 1, 0), "0 and 2"), ((0, 1, 1), (0, 1, 1), "1 and 2"), ((), (0, 0), "0 and 1")],
)
def test_layers_of_one_group_may_not_share_memory(
    groups: tuple[int, ...], order: tuple[int, ...], pair: str
) -> None:
    made = arrays(2, 2 * NUM_BLOCKS * 64)
    model = grouped(*groups) if groups else layout(num_layers=2)
    with pytest.raises(InvalidUsage, match=f"arrays {pair} both start at .* of a group memory of"):
        KVCache(model, [made[index] for index in order])


def test_one_array_of_both_planes_of_a_layer_is_refused() -> None:
    k, v = arrays(2, NUM_BLOCKS * 64)
    with pytest.raises(InvalidUsage, match="arrays 0 and 1 both start at"):
        KVCache(grouped(0, 1), [k, k, v, v])


def test_a_rank_goes_by_the_groups_of_its_own_layers() -> None:
    shared, own = arrays(2, 2 * NUM_BLOCKS * 64)
    model = grouped(0, 0, 0, 1)
    KVCache(model, [shared, shared], rank=TPLayout(pp_size=2, pp_rank=1)).close()
    with pytest.raises(InvalidUsage, match="arrays 0 and 1 both start at"):
        KVCache(model, [shared, shared], rank=TPLayout(pp_size=2, pp_rank=0))
    KVCache(model, [shared, own], rank=TPLayout(pp_size=2, pp_rank=0)).close()


def test_arrays_that_overlap_are_refused_and_leave_nothing_registered() -> None:
    whole = aligned(4 * 2 * NUM_BLOCKS * 64)
    size = 2 * NUM_BLOCKS * 64
    parts = [whole[:size], whole[size : 2 * size], whole[2 * size - 64 : 3 * size - 64]]
    with pytest.raises(RegistrationError, match="overlaps the registered"):
        KVCache(layout(), parts)
    register(whole).close()


def test_what_is_no_array_is_refused_and_leaves_nothing_registered() -> None:
    made = arrays(2, 2 * NUM_BLOCKS * 64)
    with pytest.raises(InvalidUsage, match=r"builtins\.str is not an array"):
        KVCache(layout(), [*made, "array"])
    with pytest.raises(InvalidUsage, match="not contiguous"):
        KVCache(layout(), [*made, aligned(4 * NUM_BLOCKS * 64)[::2]])
    with pytest.raises(InvalidUsage, match="is empty"):
        KVCache(layout(), [*made, np.zeros(0, np.uint8)])
    for array in made:
        # Another size at the same address: refused while anything of it is registered.
        register(array[:64]).close()


def test_a_closed_cache_is_dead_and_frees_its_arrays() -> None:
    made = arrays(3, 2 * NUM_BLOCKS * 64)
    cache = KVCache(layout(), made)
    cache.require_live()
    cache.close()
    cache.close()
    with pytest.raises(RegistrationError, match="is no longer registered"):
        cache.require_live()
    with KVCache(layout(), made) as again:
        again.require_live()


def test_two_caches_may_share_memory_until_both_are_closed() -> None:
    array = aligned(6 * NUM_BLOCKS * 64)
    first, second = KVCache(layout(), array), KVCache(layout(), array)
    first.close()
    second.require_live()
    with pytest.raises(RegistrationError, match="overlaps"):
        register(array[:64])
    second.close()
    register(array[:64]).close()


def test_whoever_asked_is_told_once_that_the_cache_closes() -> None:
    told = []
    cache = KVCache(layout(), aligned(6 * NUM_BLOCKS * 64))
    # Told while the memory is still registered: nobody else can have it yet.
    cache.on_close(lambda: told.append(cache.registrations[0].closed))
    cache.close()
    cache.close()
    assert told == [False]


def test_whoever_took_it_back_is_not_told() -> None:
    told: list[str] = []
    cache = KVCache(layout(), aligned(6 * NUM_BLOCKS * 64))
    # Equal calls, told apart by what takes them back.
    cancel, keep = (cache.on_close(lambda name=name: told.append(name)) for name in ("a", "b"))
    cancel()
    cancel()
    cache.close()
    keep()
    assert told == ["b"]
