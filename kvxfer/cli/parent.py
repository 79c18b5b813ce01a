"""Whether whoever started this program still holds the pipe on its standard input."""

import os
import select
import stat
import time
from typing import Final

_STDIN: Final = 0


class Parent:
    """The other end of standard input; a terminal or /dev/null says nothing of it."""

    def __init__(self) -> None:
        """Look what standard input is."""
        try:
            mode = os.fstat(_STDIN).st_mode
        except OSError:  # closed by the shell
            mode = 0
        self._is_pipe = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Whether it has closed the pipe, within ``timeout_s``; never where there is none."""
        if not self._is_pipe:
            time.sleep(timeout_s)
            return False
        end_s = time.monotonic() + timeout_s
        while select.select([_STDIN], [], [], max(end_s - time.monotonic(), 0.0))[0]:
            if not os.read(_STDIN, 4096):
                return True
        return False
