"""The option ``--json`` of commands that print one result: a file beside the table, or ``-``."""

import argparse
from collections.abc import Callable

from rich.console import Console

from kvxfer.cli.output import show, write
from kvxfer.report.export import require_writable, write_file

_STDOUT = "-"


def add_json(parser: argparse.ArgumentParser) -> None:
    """Define it."""
    parser.add_argument("--json", metavar="FILE", help="the figures too; - for them alone")


def require_target(path: str | None) -> None:
    """Check before the work that :func:`print_result` can write to ``path``.

    Raises:
        InvalidUsage: it cannot; names the path and the cause.
    """
    if path is not None and path != _STDOUT:
        require_writable(path)


def print_result(
    path: str | None,
    text: Callable[[], str],
    render: Callable[[Console], None],
    *,
    width: int | None = None,
) -> None:
    """Print what ``render`` does, then write the JSON to a file; with ``-`` print the JSON alone.

    Args:
        path: of ``--json``; None = it was not given.
        text: the JSON, without a line end.
        render: prints the same for people.
        width: columns; None = those of the terminal.

    Raises:
        InvalidUsage: the file or standard output cannot be written.
    """
    if path == _STDOUT:
        write(text() + "\n")
        return
    show(render, width=width)
    if path is not None:
        write_file(path, text() + "\n")
