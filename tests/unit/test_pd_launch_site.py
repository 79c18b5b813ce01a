"""What a Python says of itself, and what it says instead."""

import json
import sys
from pathlib import Path

import pytest

from kvxfer.errors import NotAvailable
from kvxfer.pd.launch.python_site import look

WITHOUT = {"has_vllm": False, "has_kvxfer": True, "has_flashinfer": False, "versions": {}}
WITH = {**WITHOUT, "has_vllm": True, "versions": {"vllm": "0.32.0+cpu", "nixl": None}}


def program(folder: Path, printed: bytes, status: int = 0) -> Path:
    """A program that prints something, whatever it is asked."""
    (folder / "printed").write_bytes(printed)
    path = folder / "python"
    path.write_text(f"#!/bin/sh\ncat {folder}/printed\nexit {status}\n")
    path.chmod(0o755)
    return path


def test_packages_are_those_that_are_there(tmp_path: Path) -> None:
    found = look(str(program(tmp_path, json.dumps(WITH).encode())))
    assert (found.versions, found.is_cpu) == ({"vllm": "0.32.0+cpu"}, True)


def test_a_relative_path_is_one_from_here_and_a_link_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, json.dumps(WITH).encode())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("../python")
    monkeypatch.chdir(tmp_path)
    assert look("bin/python").python == str(tmp_path / "bin" / "python")
    assert look("./python").python == str(tmp_path / "python")


def test_a_name_without_a_folder_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, json.dumps(WITH).encode()).rename(tmp_path / "some-python")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert look("some-python").python == "some-python"


@pytest.mark.parametrize(
    "printed",
    [
        b"", b"[]", b"{}", b"5", b"welcome\n" + json.dumps(WITH).encode(), b"\xff\xfe",
        b'{"vllm": 5}', json.dumps({**WITH, "versions": {"vllm": 5}}).encode(), b"[" * 100_000,
    ],
    ids=lambda printed: repr(printed[:20]),
)  # fmt: skip
def test_a_program_that_prints_something_else_is_named(tmp_path: Path, printed: bytes) -> None:
    path = program(tmp_path, printed)
    with pytest.raises(NotAvailable, match="was asked for its packages") as error:
        look(str(path))
    assert str(path) in str(error.value)
    assert printed[:8].decode(errors="replace").strip() in str(error.value)


def test_a_program_that_fails_is_told_in_its_words(tmp_path: Path) -> None:
    path = program(tmp_path, b"", status=3)
    path.write_text(path.read_text().replace("cat", "printf '\\377 no such thing' >&2; cat"))
    with pytest.raises(NotAvailable, match="no such thing"):
        look(str(path))


def test_a_python_without_vllm_is_told_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(NotAvailable, match="has no vLLM"):
        look(str(program(tmp_path, json.dumps(WITHOUT).encode())))
    with pytest.raises(NotAvailable, match="cannot run /no/python"):
        look("/no/python")


def test_this_python_can_be_asked() -> None:
    try:
        assert look().python == sys.executable
    except NotAvailable as error:
        assert "has no vLLM" in str(error)  # noqa: PT017
