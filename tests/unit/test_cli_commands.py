"""Sub-commands: listed without being imported, and whole when they are used."""

from importlib import import_module
from pathlib import Path

import pytest
from imports import modules_after

from kvxfer.cli import main as program
from kvxfer.cli import pd

COMMANDS = [(f"kvxfer.cli.{name}", (name,)) for name in program._COMMANDS]
COMMANDS += [(f"kvxfer.cli.pd.{name}", ("pd", name)) for name in pd._COMMANDS]


def help_of(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """All of it on one line, however wide a terminal is said to be."""
    with pytest.raises(SystemExit) as ended:
        program.main([*words, "--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("module", "words"), COMMANDS, ids=lambda value: value[-1])
def test_a_command_is_summed_up_and_has_its_options(
    module: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    first_line = (import_module(module).__doc__ or "").splitlines()[0]
    summary = first_line.partition(": ")[2]
    assert summary
    assert summary in help_of(words[:-1], capsys)
    whole = help_of(words, capsys)
    assert summary in whole
    assert f"usage: kvxfer {' '.join(words)} [-h]" in whole


def test_no_command_is_imported_to_list_them(tmp_path: Path) -> None:
    listing = "from kvxfer.cli.main import build_parser; build_parser().format_help()"
    found = modules_after(listing, tmp_path)
    assert not {module for module, _ in COMMANDS} & found
    assert "numpy" not in found
    used = "from kvxfer.cli.main import build_parser; build_parser().parse_args(['key', 'k'])"
    assert "kvxfer.cli.key" in modules_after(used, tmp_path)


@pytest.mark.parametrize("words", [words for _, words in COMMANDS], ids=" ".join)
def test_help_shows_no_default_that_is_none(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = help_of(words, capsys)
    for empty in ("(default: )", "(default: [])", "(default: ())", "(default: None)"):
        assert empty not in whole
