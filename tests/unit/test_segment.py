"""Shared segments: sealed, checked when opened, found again, and given back."""

import errno
import fcntl
import gc
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from leaks import check_flat, resources

from kvxfer import _core
from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable, PeerLost, RegistrationError
from kvxfer.memory import create_segment, find_segment, shared_empty

PAGE = mmap.PAGESIZE
F_ADD_SEALS, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 1, 2, 4  # linux/fcntl.h
OWN = os.getpid()


@pytest.mark.parametrize("wanted", [1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE])
def test_a_segment_is_zeroed_whole_pages(wanted: int) -> None:
    segment = create_segment(wanted)
    assert segment.num_bytes == -(-wanted // PAGE) * PAGE
    assert segment.address % PAGE == 0
    assert not np.frombuffer(segment, np.uint8).any()


@pytest.mark.parametrize("shape", [-1, (2, -3), (-2, -3)])
def test_a_negative_length_is_refused(shape: int | tuple[int, ...]) -> None:
    with pytest.raises(InvalidUsage, match=r"of shape \[.*-.*\]; use lengths of 0 or more"):
        shared_empty(shape)


@pytest.mark.parametrize("num_bytes", [0, (1 << 46) + 1, 1 << 63])
def test_an_absurd_size_is_refused_with_its_limits(num_bytes: int) -> None:
    with pytest.raises(InvalidUsage, match=f"segment of {num_bytes} bytes; use 1 to {1 << 46}"):
        create_segment(num_bytes)


def test_arrays_have_the_shape_and_dtype_asked_for() -> None:
    for shape, dtype in [((2, 3), np.float32), (7, np.int64), ((), np.uint8), ((0, 4), np.uint8)]:
        array = shared_empty(shape, dtype)
        assert array.shape == (shape if isinstance(shape, tuple) else (shape,))
        assert array.dtype == dtype
        assert array.flags.writeable
        assert not array.any()
    assert shared_empty(np.int64(5)).shape == (5,)


def test_what_one_mapping_writes_the_other_reads() -> None:
    mine = create_segment(3 * PAGE)
    theirs = _core.SharedSegment.open(OWN, mine.fd, mine.num_bytes)
    assert theirs.address != mine.address
    left, right = np.frombuffer(mine, np.uint8), np.frombuffer(theirs, np.uint8)
    left[:] = np.random.default_rng(1).integers(0, 256, left.size, dtype=np.uint8)
    assert np.array_equal(left, right)
    right[17] ^= 1
    assert left[17] == right[17]


def test_the_descriptor_is_not_inherited() -> None:
    assert not os.get_inheritable(create_segment(1).fd)


@pytest.mark.parametrize("size", [0, PAGE, 3 * PAGE])
def test_the_owner_cannot_resize_it(size: int) -> None:
    segment = create_segment(2 * PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, size)
    assert os.fstat(segment.fd).st_size == 2 * PAGE


def test_nobody_can_add_a_seal() -> None:
    # F_SEAL_WRITE would turn the other side's later mapping into an error.
    segment = create_segment(PAGE)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, F_ADD_SEALS, 8)


_PEER = """
import errno, os, sys
fd = os.open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", os.O_RDWR)
for size in (0, 4096, 1 << 30):
    try:
        os.ftruncate(fd, size)
        print("resized to", size)
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


def run_peer(fd: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _PEER, str(OWN), str(fd)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_peer_cannot_shrink_it_under_our_feet() -> None:
    segment = create_segment(2 * PAGE)
    assert run_peer(segment.fd) == ["EPERM"] * 3
    assert np.frombuffer(segment, np.uint8).sum() == 0  # a SIGBUS, had it shrunk


def test_the_peer_of_that_test_can_shrink_what_is_not_sealed() -> None:
    fd = os.memfd_create("unsealed")
    try:
        os.ftruncate(fd, 2 * PAGE)
        assert "resized to 0" in run_peer(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("num_bytes", [1, PAGE, 2 * PAGE - 1, 2 * PAGE + 1, 3 * PAGE, 1 << 45])
def test_another_size_than_the_real_one_is_refused_by_both(num_bytes: int) -> None:
    segment = create_segment(2 * PAGE)
    with pytest.raises(RegistrationError, match=f"{2 * PAGE} bytes, the peer says {num_bytes}"):
        _core.SharedSegment.open(OWN, segment.fd, num_bytes)
    with pytest.raises(RegistrationError, match="the peer says 0"):
        _core.SharedSegment.open(OWN, segment.fd, 0)


def regular_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE)
        return os.dup(file.fileno())


def memfd(seals: int | None) -> Callable[[], int]:
    def make() -> int:
        fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, PAGE)
        if seals is not None:
            fcntl.fcntl(fd, F_ADD_SEALS, seals)
        return fd

    return make


def pipe() -> int:
    ends = os.pipe()
    os.close(ends[0])
    return ends[1]


NOT_SEGMENTS: dict[str, Callable[[], int]] = {
    "a file": regular_file,
    "a memfd without seals": memfd(None),
    "a memfd that may shrink": memfd(F_SEAL_GROW | F_SEAL_SEAL),
    "a memfd that may grow": memfd(F_SEAL_SHRINK | F_SEAL_SEAL),
    "a memfd whose seals are open": memfd(F_SEAL_SHRINK | F_SEAL_GROW),
    "a pipe": pipe,
    "a folder": lambda: os.open("/proc", os.O_RDONLY),
    "a device": lambda: os.open("/dev/null", os.O_RDWR),
}


@pytest.mark.parametrize("name", NOT_SEGMENTS)
def test_a_descriptor_of_anything_else_is_refused(name: str) -> None:
    fd = NOT_SEGMENTS[name]()
    try:
        with pytest.raises(RegistrationError if name != "a folder" else NotAvailable) as caught:
            _core.SharedSegment.open(OWN, fd, PAGE)
        assert f"/proc/{OWN}/fd/{fd}" in str(caught.value)
        if name != "a folder":
            assert "is not a sealed shared segment" in str(caught.value)
    finally:
        os.close(fd)


def test_a_descriptor_or_process_that_is_not_there_is_a_lost_peer() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    for pid, fd in ((OWN, 1 << 20), (gone.pid, 0)):
        with pytest.raises(PeerLost, match=f"opening /proc/{pid}/fd/{fd}: No such file") as caught:
            _core.SharedSegment.open(pid, fd, PAGE)
        assert caught.value.code == errno.ENOENT


@pytest.mark.parametrize(("pid", "fd"), [(-1, 0), (0, 0), (OWN, -1)], ids=["pid", "group", "fd"])
def test_ids_that_cannot_be_are_refused(pid: int, fd: int) -> None:
    with pytest.raises(KvxferError, match=f"opening /proc/{pid}/fd/{fd}"):
        _core.SharedSegment.open(pid, fd, PAGE)


def test_a_range_is_found_in_the_segment_that_holds_all_of_it() -> None:
    first, second = create_segment(4 * PAGE), create_segment(2 * PAGE)
    for segment in (first, second):
        begin, end = segment.address, segment.address + segment.num_bytes
        assert find_segment(begin, segment.num_bytes) == (segment, 0)
        assert find_segment(begin + 100, 1) == (segment, 100)
        assert find_segment(end - 1, 1) == (segment, segment.num_bytes - 1)
        found = find_segment(end - 1, 2)
        assert found is None or found[0] is not segment
        found = find_segment(begin - 1, segment.num_bytes)
        assert found is None or found[0] is not segment


def test_private_memory_is_in_no_segment() -> None:
    array = np.zeros(PAGE, np.uint8)
    assert find_segment(array.ctypes.data, array.nbytes) is None


def test_a_view_keeps_the_segment_and_the_last_one_frees_it() -> None:
    view = shared_empty((4, PAGE))[1:3]
    gc.collect()
    found = find_segment(view.ctypes.data, view.nbytes)
    assert found is not None
    assert found[1] == PAGE
    address = view.ctypes.data
    del view, found
    gc.collect()
    assert find_segment(address, 1) is None


def make_and_drop() -> None:
    array = shared_empty(3 * PAGE)
    array[::PAGE] = 1
    segment = find_segment(array.ctypes.data, array.nbytes)
    assert segment is not None
    opened = _core.SharedSegment.open(OWN, segment[0].fd, segment[0].num_bytes)
    with pytest.raises(RegistrationError):
        _core.SharedSegment.open(OWN, segment[0].fd, PAGE)
    del opened


def test_segments_that_come_and_go_leave_nothing() -> None:
    check_flat(resources, make_and_drop, num_cycles=200)


@pytest.mark.parametrize("what", ["fds", "segment_mappings"])
def test_the_leak_check_fails_on_a_planted_leak(what: str) -> None:
    kept: list[Any] = []

    def cycle() -> None:
        make_and_drop()
        if what == "segment_mappings":
            kept.append(create_segment(1))
        elif len(kept) < 10:
            kept.append(os.open("/dev/null", os.O_RDONLY))

    try:
        with pytest.raises(AssertionError, match=rf"leak over 200 cycles.*{what}"):
            check_flat(resources, cycle, num_cycles=200, settle_s=0.1)
    finally:
        for one in kept:
            if isinstance(one, int):
                os.close(one)
