"""Files that are written whole or not at all."""

import os
from pathlib import Path

import pytest
from full_disk import largest_file

from kvxfer.errors import InvalidUsage
from kvxfer.report.export import write_file
from kvxfer.whole_file import write_whole


def test_a_file_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with pytest.raises(InvalidUsage, match="No such file"):
        write_whole(path, b"first")
    assert write_whole(path, b"first", make_folders=True) == path
    write_whole(path, b"second")
    assert path.read_bytes() == b"second"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]


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
