"""The paged copy on CPU threads, against a copy of the same pages in plain Python."""

import ctypes
import functools
import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from arena import Arena, copied, make_arena, plan_tables, sparse_memory
from copy_boxes import CopyBox, core_tables
from host_copies import ENGINES, POSSIBLE, copy, needs_attach, pool
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import eventually

from kvxfer import _core
from kvxfer.errors import InvalidUsage, PeerLost, TransferFailed

GIB = 1 << 30
KIB = 1 << 10
SIZES = [1, 7, 63, 64, 65, 4096, 300 * KIB]


def check(src: Arena, dst: Arena, engine: str, num_threads: int) -> None:
    expected = copied(src, dst)
    source = src.memory.copy()
    copy(plan_tables(src, dst), engine, num_threads)
    assert np.array_equal(dst.memory, expected)
    assert np.array_equal(src.memory, source)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("page_bytes", SIZES)
def test_pages_of_any_size_arrive_and_their_surroundings_stay(
    page_bytes: int, engine: str, num_threads: int
) -> None:
    num_blocks = 3 if page_bytes > KIB * 64 else 13
    for seed, (src_shift, dst_shift) in enumerate([(0, 0), (1, 0), (0, 8), (3, 61)]):
        src = make_arena(2, num_blocks, page_bytes, seed=seed, shift=src_shift)
        dst = make_arena(2, num_blocks, page_bytes, seed=seed + 100, shift=dst_shift)
        check(src, dst, engine, num_threads)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("page_bytes", [256 * KIB, 256 * KIB + 64, 1024 * KIB + 1])
def test_one_large_page_is_shared_among_the_threads(
    page_bytes: int, engine: str, num_threads: int
) -> None:
    src = make_arena(1, 1, page_bytes, seed=1)
    check(src, make_arena(1, 1, page_bytes, seed=2), engine, num_threads)


@pytest.mark.parametrize("engine", ENGINES)
def test_more_pages_than_one_system_call_takes(engine: str) -> None:
    # 3 x 1500 pieces that do not touch: several calls of at most 1024 for each thread.
    check(make_arena(3, 1500, 16, seed=1), make_arena(3, 1500, 16, seed=2), engine, 2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ["forwards", "backwards", "swapped neighbours"])
def test_pages_that_touch_are_joined_right(engine: str, order: str) -> None:
    ids = np.arange(40)
    ids = {"forwards": ids, "backwards": ids[::-1], "swapped neighbours": ids ^ 1}[order]
    random_ = np.random.default_rng(1)
    memory = [random_.integers(0, 256, 2 * 40 * 96 + 64, dtype=np.uint8) for _ in range(2)]
    planes, straight = [32, 32 + 40 * 96], [int(block) * 96 for block in range(40)]
    shuffled = [int(block) * 96 for block in ids]
    for src_blocks, dst_blocks in ((straight, shuffled), (shuffled, straight)):
        src = Arena(memory[0], planes, src_blocks, 96)
        check(src, Arena(memory[1], planes, dst_blocks, 96), engine, 2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("num_planes", "num_blocks"), [(0, 0), (0, 5), (5, 0)])
def test_no_pages_are_no_bytes(engine: str, num_planes: int, num_blocks: int) -> None:
    src = make_arena(num_planes, num_blocks, 64, seed=1)
    check(src, make_arena(num_planes, num_blocks, 64, seed=2), engine, 3)


def test_one_source_may_go_to_many_places() -> None:
    src = make_arena(2, 9, 128, seed=1)
    repeated = Arena(src.memory, src.plane_offsets, [src.block_offsets[4]] * 9, 128)
    for engine in POSSIBLE:
        check(repeated, make_arena(2, 9, 128, seed=2), engine, 2)


@settings(max_examples=150)
@given(
    num_planes=st.integers(1, 4),
    num_blocks=st.integers(0, 12),
    page_bytes=st.one_of(
        st.integers(1, 300), st.sampled_from([64, 128, 192, 256, 320, 4096, 4160])
    ),
    src_shift=st.integers(0, 63),
    dst_shift=st.one_of(st.just(0), st.integers(0, 63)),
    engine=st.sampled_from(POSSIBLE),
    num_threads=st.integers(1, 5),
    seed=st.integers(0, 1 << 30),
)
def test_any_plan_agrees_with_the_oracle(
    num_planes: int,
    num_blocks: int,
    page_bytes: int,
    src_shift: int,
    dst_shift: int,
    engine: str,
    num_threads: int,
    seed: int,
) -> None:
    src = make_arena(num_planes, num_blocks, page_bytes, seed=seed, shift=src_shift, gap_bytes=1)
    dst = make_arena(num_planes, num_blocks, page_bytes, seed=seed + 1, shift=dst_shift)
    check(src, dst, engine, num_threads)


def test_the_oracle_sees_a_byte_outside_the_pages() -> None:
    src, dst = make_arena(2, 5, 64, seed=1), make_arena(2, 5, 64, seed=2)
    expected = copied(src, dst)
    copy(plan_tables(src, dst), "memcpy", 1)
    dst.memory[dst.plane_offsets[0] + dst.block_offsets[0] - 1] ^= 1
    assert not np.array_equal(dst.memory, expected)


# The places where an offset that was cut to 31 or 32 bits, or taken for negative, would go wrong.
FAR_OFFSETS = [
    2 * GIB - 4096,
    2 * GIB,
    2 * GIB + 65536,
    4 * GIB - 4096,
    4 * GIB,
    4 * GIB + 65536,
    5 * GIB - 1048576,
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("far_side", ["source", "destination"])
def test_offsets_past_2_and_4_gib_are_not_cut(engine: str, far_side: str) -> None:
    memory = sparse_memory(5 * GIB)
    near = make_arena(1, len(FAR_OFFSETS), 4096, seed=1)
    far = Arena(memory, [0], FAR_OFFSETS, 4096)
    wanted = [near.page(0, block).copy() for block in range(len(FAR_OFFSETS))]
    if far_side == "source":
        for block, page in enumerate(wanted):
            far.page(0, block)[:] = page
        near.memory[:] = 0
        copy(plan_tables(far, near), engine, 2)
        found = near
    else:
        copy(plan_tables(near, far), engine, 2)
        found = far
    for block, page in enumerate(wanted):
        assert np.array_equal(found.page(0, block), page)
    # Where the low 31 or 32 bits of those offsets point, nothing may have arrived.
    for offset in FAR_OFFSETS:
        for low in {offset % (2 * GIB), offset % (4 * GIB)} - set(FAR_OFFSETS):
            assert not memory[low : low + 4096].any()


def test_blocks_of_1_mib_past_2_and_4_gib_round_trip() -> None:
    mib = 1 << 20
    block_ids = [2047, 2048, 4095, 4096, 5119]
    far = Arena(sparse_memory(5 * GIB), [0], [block * mib for block in block_ids], mib)
    there, back = make_arena(1, 5, mib, seed=1), make_arena(1, 5, mib, seed=2)
    copy(plan_tables(there, far), "streaming", 2)
    copy(plan_tables(far, back), "memcpy", 2)
    assert all(np.array_equal(back.page(0, block), there.page(0, block)) for block in range(5))
    assert not far.memory[: 16 * mib].any()


def test_planes_further_apart_than_4_gib() -> None:
    memory = sparse_memory(10 * GIB)
    far = Arena(memory, [0, 5 * GIB, 10 * GIB - 65536], [8192, 0, 24576], 4096)
    near = make_arena(3, 3, 4096, seed=1)
    for engine in POSSIBLE:
        copy(plan_tables(near, far), engine, 3)
        for plane in range(3):
            for block in range(3):
                assert np.array_equal(far.page(plane, block), near.page(plane, block))
                far.page(plane, block)[:] = 0


@pytest.mark.parametrize("num_threads", [0, -1, 257, 1 << 20])
def test_a_team_of_an_absurd_size_is_refused(num_threads: int) -> None:
    with pytest.raises(InvalidUsage, match=f"num_threads is {num_threads}; use 1 to 256"):
        _core.WorkerPool(num_threads)


def tasks() -> set[str]:
    """The threads of this process; one that was joined may be there for a moment."""
    return set(os.listdir("/proc/self/task"))  # noqa: PTH208 - only their names


def test_a_team_serves_many_jobs_and_ends() -> None:
    before = tasks()
    team = _core.WorkerPool(4)
    own = tasks() - before
    assert len(own) == 3
    assert team.num_threads == 4
    for turn in range(300):
        src = make_arena(1, turn % 9, 1 + turn % 70, seed=turn)
        dst = make_arena(1, turn % 9, 1 + turn % 70, seed=turn + 1)
        expected = copied(src, dst)
        _core.paged_copy_host(team, plan_tables(src, dst), turn % 2 == 0)
        assert np.array_equal(dst.memory, expected)
    assert own <= tasks()
    del team
    eventually(lambda: not own & tasks(), "threads are left")


def test_jobs_of_several_threads_queue_for_one_team() -> None:
    team = _core.WorkerPool(3)
    failures: list[int] = []

    def work(number: int) -> None:
        for turn in range(40):
            src = make_arena(2, 7, 999, seed=number)
            dst = make_arena(2, 7, 999, seed=1000 * number + turn)
            expected = copied(src, dst)
            _core.paged_copy_host(team, plan_tables(src, dst), turn % 2 == 0)
            if not np.array_equal(dst.memory, expected):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures


@functools.lru_cache
def forbidden_page() -> int:
    """The address of a page that no access may touch."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    private_anonymous = 0x22
    address = libc.mmap(None, 4096, 0, private_anonymous, -1, 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    return int(address)


@needs_attach
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("engine", ["read", "write"])
@pytest.mark.parametrize("bad_plane", [0, 3, 6])
def test_a_failure_of_any_member_is_raised_and_the_team_lives(
    engine: str, num_threads: int, bad_plane: int
) -> None:
    # One page a plane, so that a plane's address can lead to a page that no access may touch.
    near, far = make_arena(7, 1, 64, seed=1), make_arena(7, 1, 64, seed=2)
    src, dst = (far, near) if engine == "read" else (near, far)
    expected = copied(src, dst)
    planes = {"read": src.planes, "write": dst.planes}
    planes[engine][bad_plane] = forbidden_page()
    src_planes, dst_planes = {
        "read": (planes["read"], dst.planes),
        "write": (src.planes, planes["write"]),
    }[engine]
    box = CopyBox(0, 7, 0, 1, run_bytes=64)
    spoiled = core_tables(src_planes, dst_planes, np.zeros((1, 4), np.uint32), [box])
    call = "process_vm_readv" if engine == "read" else "process_vm_writev"
    for _ in range(3):
        with pytest.raises(TransferFailed, match=rf"{call}.*moved \d+ of \d+ bytes.*Bad address"):
            copy(spoiled, engine, num_threads)
    copy(plan_tables(src, dst), engine, num_threads)
    assert np.array_equal(dst.memory, expected)


@needs_attach
@pytest.mark.parametrize("writes", [True, False])
def test_a_process_that_is_gone_is_lost(writes: bool) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    arena = make_arena(1, 3, 64, seed=1)
    before = arena.memory.copy()
    with pytest.raises(PeerLost, match=f"with process {gone.pid} moved 0 of .*is gone"):
        _core.paged_copy_process_vm(pool(2), plan_tables(arena, arena), gone.pid, writes)
    assert np.array_equal(arena.memory, before)


def test_tables_outlive_the_arrays_they_were_made_of() -> None:
    src, dst = make_arena(4, 50, 64, seed=1), make_arena(4, 50, 64, seed=2)
    expected = copied(src, dst)
    tables = plan_tables(src, dst)
    gc.collect()
    junk = [np.full(50, 1 << 62, np.uint64) for _ in range(64)]
    copy(tables, "memcpy", 2)
    assert len(junk) == 64
    assert np.array_equal(dst.memory, expected)


@needs_attach
def test_neighbours_on_one_side_alone_do_not_pass_the_kernels_limit() -> None:
    """3,000 pages in a row here, every other page over there: only one list of a call can merge."""
    page, count = 64, 3000
    source = np.random.default_rng(0).integers(0, 256, count * page, np.uint8)
    target = np.zeros(2 * count * page, np.uint8)
    segments = np.zeros((count, 4), np.uint32)
    segments[:, :2] = np.arange(count)[:, None]
    box = CopyBox(0, 1, 0, count, src_block_stride=page, dst_block_stride=2 * page, run_bytes=page)
    tables = core_tables(
        np.array([source.ctypes.data], np.uint64),
        np.array([target.ctypes.data], np.uint64),
        segments,
        [box],
    )
    for engine in ("write", "read"):
        target[:] = 0
        copy(tables, engine, 1)
        assert (target.reshape(count, 2, page)[:, 0].reshape(-1) == source).all()
