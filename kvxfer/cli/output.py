"""What commands print on standard output."""

import os
import sys
from collections.abc import Callable

from rich.console import Console

from kvxfer.errors import InvalidUsage


def show(render: Callable[[Console], None], *, width: int | None = None) -> None:
    """Write what ``render`` prints; a reader that went away, as ``head`` does, is no error.

    Raises:
        InvalidUsage: standard output cannot be written, say on a full disk.
    """
    if sys.stdout is None:  # closed by the shell
        return
    console = Console(width=width)
    try:
        # Captured, because rich itself ends the program with status 1 at a broken pipe.
        with console.capture() as captured:
            render(console)
        sys.stdout.write(captured.get())
        sys.stdout.flush()
    except OSError as error:
        # Python flushes once more as it ends, and would complain again.
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)
        if not isinstance(error, BrokenPipeError):
            raise InvalidUsage(
                f"cannot write to standard output: {error.strerror}", error.errno or 0
            ) from error
