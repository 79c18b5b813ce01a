"""Scratch folders: what of them stays, and that it is named."""

import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from kvxfer.errors import NotAvailable, PeerLost
from kvxfer.pd.launch.scratch import Scratch, scratch_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where scratch folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def fill(scratch: Scratch) -> None:
    (scratch.logs / "pd-1").mkdir()
    (scratch.logs / "pd-1" / "prefill0.log").write_text("why")
    (scratch.models / "tiny").mkdir()
    (scratch.models / "tiny" / "config.json").write_text("{}")


def test_nothing_stays_where_all_went_well(temporary: Path) -> None:
    with scratch_folder(None) as scratch:
        fill(scratch)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("is_raised", [True, False])
def test_logs_of_a_failure_stay_alone_and_are_named(
    temporary: Path, caplog: pytest.LogCaptureFixture, is_raised: bool
) -> None:
    with suppress(PeerLost), scratch_folder(None) as scratch:
        fill(scratch)
        if is_raised:
            raise PeerLost("an engine ended")
        scratch.has_failed = True
    files = [path for path in temporary.rglob("*") if path.is_file()]
    assert files == [scratch.logs / "pd-1" / "prefill0.log"]
    assert not scratch.models.exists()
    assert caplog.messages == [f"logs are kept in {scratch.logs}"]


def test_a_failure_without_logs_leaves_nothing(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        with scratch_folder(None) as scratch:
            (scratch.models / "config.json").write_text("{}")
            (scratch.logs / "pd-1").mkdir()
            raise NotAvailable("a port is in use")

    with pytest.raises(NotAvailable):
        fail()
    assert list(temporary.iterdir()) == []
    assert caplog.messages == []


def test_a_folder_that_was_asked_for_stays_whole(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "kept") as scratch:
        fill(scratch)
    assert len([path for path in (tmp_path / "kept").rglob("*") if path.is_file()]) == 2
