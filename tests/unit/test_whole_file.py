"""Files that are written whole or not at all."""

import os
from pathlib import Path

import pytest
from full_disk import largest_file

from kvxfer.errors import InvalidUsage
from kvxfer.report.export import require_writable, write_file
from kvxfer.whole_file import READABLE, write_whole


def test_a_file_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with pytest.raises(InvalidUsage, match="No such file"):
        write_whole(path, b"first")
    assert write_whole(path, b"first", make_folders=True) == path
    write_whole(path, b"second")
    assert path.read_bytes() == b"second"
    assert list(path.parent.iterdir()) == [path]


def test_who_may_read_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    before = os.umask(0o077)
    try:
        write_whole(path, b"first")
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o640)
        write_whole(path, b"second")
        assert path.stat().st_mode & 0o777 == 0o640
        write_whole(path, b"third", mode=READABLE)
        assert path.stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_a_report_goes_into_a_pipe_by_its_number() -> None:
    reader, writer = os.pipe()
    try:
        require_writable(f"/dev/fd/{writer}")
        write_file(f"/dev/fd/{writer}", "told")
        assert os.read(reader, 16) == b"told"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_report_goes_behind_what_an_open_file_holds(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb", buffering=0) as file:
        file.write(b"table\n")
        write_file(f"/proc/self/fd/{file.fileno()}", "record\n")
    assert (tmp_path / "file").read_text() == "table\nrecord\n"


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_what_is_no_regular_file_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "there"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    before = path.lstat()
    with pytest.raises(InvalidUsage, match="no regular file"):
        write_whole(path, b"x")
    assert path.lstat() == before


def test_a_file_that_does_not_fit_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    with largest_file(1 << 16), pytest.raises(InvalidUsage, match="too large"):
        write_whole(path, bytes(1 << 20))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_replaces_the_file_behind_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    write_file(str(link), "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    with largest_file(2), pytest.raises(InvalidUsage, match="too large"):
        write_file(str(link), b"newer")
    assert path.read_text() == "new"


def test_a_report_goes_into_a_device_as_it_is() -> None:
    write_file("/dev/null", "text")
    with pytest.raises(InvalidUsage, match="'/dev/full': No space left"):
        write_file("/dev/full", "text")
    assert Path("/dev/full").is_char_device()
