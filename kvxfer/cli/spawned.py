"""`kvxfer serve` as a child, which ends when its input closes: also when its parent is killed."""

import argparse
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvxfer import _core
from kvxfer.closing import Closing
from kvxfer.descriptors import low_limit_hint
from kvxfer.errors import NotAvailable

_START_S = 60.0
_DEATH_S = 0.5
_END_S = 10.0  # giving back gigabytes of GPU memory takes seconds


def serve_words(
    args: argparse.Namespace, layout: str, num_blocks: int, *, beside: int
) -> list[str]:
    """The words of a `kvxfer serve` beside a `kvxfer send` that was called with ``args``.

    Its cache lies where that one's does, which is on the CUDA device ``beside``, or in host memory
    (-1); on the next GPU where there is another.
    """
    model = Path(args.model)  # of a file the child, which stands elsewhere, needs all of the path
    words = ["--model", str(model.resolve()) if model.is_file() else args.model]
    words += ["--layout", layout, "--transport", args.transport, "--blocks", str(num_blocks)]
    for option, value in (("--kv-heads", args.kv_heads), ("--threads", args.threads)):
        words += [] if value is None else [option, value]
    words += [] if args.key is None else ["--key", str(Path(args.key).resolve())]
    if beside >= 0:
        words += ["--device", str((beside + 1) % _core.device_count())]
    return words


class Spawned(Closing):
    """A running `kvxfer serve`. A context manager."""

    def __init__(self, words: Sequence[str]) -> None:
        """Start it; :meth:`read_addresses` waits until it serves."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvxfer", "serve", *words],
            # Python looks for -m where it stands: in a source tree, a kvxfer/ without _core.
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which ends it
        )
        self._drain = threading.Thread(target=self._read_on, daemon=True)

    def read_addresses(self) -> dict[str, str]:
        """Its addresses, once it serves.

        Raises:
            NotAvailable: it ended, or said nothing within a minute; its error is on stderr.
        """
        stdout = self._process.stdout
        assert stdout is not None
        end_s = time.monotonic() + _START_S
        ready = select.select([stdout], [], [], max(0.0, end_s - time.monotonic()))[0]
        line = stdout.readline() if ready else ""
        if not line.startswith("{"):
            raise NotAvailable(f"{self._why_silent()}; see its error above, if it has one")
        self._drain.start()
        addresses: dict[str, str] = json.loads(line)
        return addresses

    def close(self) -> None:
        """End it: by closing its input, and after ten seconds by killing it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._drain.ident is not None:
            self._drain.join()
        self._process.stdout.close()

    def _why_silent(self) -> str:
        """Of a worker that has not said its addresses."""
        with suppress(subprocess.TimeoutExpired):  # its output ends before the kernel says why
            code = self._process.wait(_DEATH_S)
            ended = f"ended with status {code} before it served"
            return f"the worker that was started here {ended}{low_limit_hint()}"
        return f"the worker that was started here did not serve within {_START_S:g} s"

    def _read_on(self) -> None:
        """Its lines are not shown: what is wrong is told on its worker channel too."""
        assert self._process.stdout is not None
        for _ in self._process.stdout:
            pass
