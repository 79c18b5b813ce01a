"""What commands print on standard output."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from kvxfer.errors import InvalidUsage


def show(render: Callable[[Console], None], *, width: int | None = None) -> None:
    """Write what ``render`` prints, as :func:`write` does."""
    if sys.stdout is None:
        return
    console = Console(width=width)
    # Captured, because rich itself ends the program with status 1 at a broken pipe. At its end it
    # still writes, if nothing: on a full disk that fails too.
    with _writing(), console.capture() as captured:
        render(console)
    write(captured.get())


def write(text: str) -> None:
    """Write ``text``; a reader that went away, as ``head`` does, is no error.

    Raises:
        InvalidUsage: standard output cannot be written, say on a full disk.
    """
    if sys.stdout is None:  # closed by the shell
        return
    with _writing():
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Python flushes once more as it ends, and would complain again.
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)
        if not isinstance(error, BrokenPipeError):
            raise InvalidUsage(
                f"cannot write to standard output: {error.strerror}", error.errno or 0
            ) from error
