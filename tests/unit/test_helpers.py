"""The checkers that other tests stand on: each is seen to fail where it must."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_content import GUARD_BYTES, CacheShape, check_content, shape
from leaks import check_flat, private_growth
from peer_process import ChildProcess, InThisProcess, RemoteError

SHAPE = shape(num_arrays=2)


def spoiled(place: tuple[int, int]) -> Any:
    content = SHAPE.content(1)
    content[place] ^= 1
    return content


def test_equal_contents_pass_and_seeds_differ() -> None:
    check_content(SHAPE, SHAPE.content(1), SHAPE.content(1))
    with pytest.raises(AssertionError):
        check_content(SHAPE, SHAPE.content(1), SHAPE.content(2))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((0, 0), "guard byte 0 of array 0 was written"),
        ((1, GUARD_BYTES - 1), f"guard byte {GUARD_BYTES - 1} of array 1"),
        ((0, -1), f"guard byte {SHAPE.raw_bytes - 1} of array 0"),
        ((0, GUARD_BYTES), "array 0, plane 0, block 0, byte 0: is"),
        ((1, GUARD_BYTES + SHAPE.array_bytes - 1), "array 1, plane 1, block 15, byte 127: is"),
    ],
)
def test_a_single_bit_is_found_and_placed(place: tuple[int, int], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_content(SHAPE, spoiled(place), SHAPE.content(1))


@pytest.mark.parametrize("kind", ["swapped", "duplicated", "shifted"])
def test_pages_out_of_place_are_found(kind: str) -> None:
    content = SHAPE.content(1)
    pages = SHAPE.pages(content)
    if kind == "swapped":
        pages[0, 1, [3, 4]] = pages[0, 1, [4, 3]]
    elif kind == "duplicated":
        pages[0, 1, 3] = pages[0, 1, 4]
    else:
        pages[0, 1, 3] = np.roll(pages[0, 1, 3], 1)
    with pytest.raises(AssertionError, match="array 0, plane 1, block 3, byte"):
        check_content(SHAPE, content, SHAPE.content(1))


def test_the_oracle_moves_whole_blocks_and_no_guard() -> None:
    src, dst = SHAPE.content(1), SHAPE.content(2)
    found = SHAPE.copied(src, dst, [0, 5], [7, 0])
    pages, sources = SHAPE.pages(found), SHAPE.pages(src)
    assert np.array_equal(pages[:, :, 7], sources[:, :, 0])
    assert np.array_equal(pages[:, :, 0], sources[:, :, 5])
    assert int((found != dst).any(axis=1).sum()) == 2
    rest = [block for block in range(16) if block not in (0, 7)]
    assert np.array_equal(pages[:, :, rest], SHAPE.pages(dst)[:, :, rest])
    assert np.array_equal(found[:, :GUARD_BYTES], dst[:, :GUARD_BYTES])


@pytest.mark.parametrize("made", [shape(), shape(kv="packed"), shape(kv="mla", num_kv_heads=1)])
def test_sizes_agree_with_the_layout(made: CacheShape) -> None:
    from kvxfer import KVLayout

    layout = KVLayout(**made.fields)
    assert (made.page_bytes, made.num_planes) == (layout.page_bytes, layout.num_planes)


def test_a_measure_that_grows_is_a_leak() -> None:
    state = {"things": 0, "others": 5}

    def cycle() -> None:
        state["things"] += 1

    with pytest.raises(AssertionError, match=r"leak over 7 cycles.*'things': \(3, 10\)\}"):
        check_flat(lambda: dict(state), cycle, num_cycles=7, settle_s=0.05)


def test_a_measure_that_settles_is_no_leak() -> None:
    end_s = time.monotonic() + 0.6
    check_flat(
        lambda: {"things": int(time.monotonic() < end_s and bool(made))},
        lambda: made.append(1),
        num_cycles=3,
    )


made: list[int] = []


def test_growth_is_measured_at_its_peak() -> None:
    with private_growth() as growth:
        held = np.ones(256 << 20, np.uint8)  # far more than other tests' garbage, freed meanwhile
        end_s = time.monotonic() + 20.0
        while growth.peak_bytes < held.nbytes >> 1 and time.monotonic() < end_s:
            time.sleep(0.001)
        del held
    assert growth.peak_bytes > 64 << 20
    with private_growth() as growth:
        pass
    assert growth.peak_bytes < 8 << 20


def test_a_child_ends_with_its_input() -> None:
    child = ChildProcess()
    pid = child.pid
    assert Path(f"/proc/{pid}").exists()
    child.close()
    assert child.reap() == 0
    assert not Path(f"/proc/{pid}").exists()


def test_a_killed_child_is_reaped() -> None:
    with ChildProcess() as child:
        child.open(shape(), seed=1, memory="private", transport="shm")
        child.kill()
        child.release()
    assert child.reap() == -9
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)


def test_what_a_call_raises_comes_back_by_name() -> None:
    with ChildProcess() as child:
        with pytest.raises(RemoteError, match="InvalidUsage: 3 arrays for 2 layers") as caught:
            child.open(shape(num_arrays=3), seed=1, memory="private", transport="shm")
        assert caught.value.kind == "InvalidUsage"
        # It serves on.
        child.open(shape(), seed=1, memory="shared", transport="shm")
        check_content(shape(), child.content(), shape().content(1))


def test_a_child_that_dies_in_a_call_is_reported() -> None:
    with ChildProcess() as child:
        child.call("resources")
        child.kill()
        with pytest.raises((AssertionError, BrokenPipeError)):
            child.call("resources")


def test_both_peers_answer_alike() -> None:
    near, far = InThisProcess(), ChildProcess()
    try:
        for peer in (near, far):
            peer.open(shape(), seed=3, memory="private", transport="shm")
            assert peer.call("num_free") == 16
        assert np.array_equal(near.content(), far.content())
        assert set(near.call("resources")) == set(far.call("resources"))
    finally:
        near.close()
        far.close()
