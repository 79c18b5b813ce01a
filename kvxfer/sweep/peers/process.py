"""How the sweep starts and ends the process that measures a peer library.

What a library prints goes to a file, of which an error quotes the last line: a library that ends
the process leaves nothing else.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import msgspec

from kvxfer import errors
from kvxfer.errors import KvxferError, PeerLost
from kvxfer.sweep.peers.registry import row_of
from kvxfer.sweep.peers.task import PeerTask, Said
from kvxfer.sweep.result import SweepResult

_MAIN = "kvxfer.sweep.peers.main"
_END_S = 5.0
_QUOTED_CHARS = 300


def measure_apart(task: PeerTask, on_round: Callable[[], None], main: str = _MAIN) -> SweepResult:
    """Measure a case in a process of its own, which starts the far side's.

    Raises:
        PeerLost: it ended before it had a result.
        KvxferError: what it raised.
    """
    _, row = row_of(task.case.peer)
    reader, writer = os.pipe()
    with TemporaryFile() as log, os.fdopen(reader, "rb") as lines:
        try:
            process = _start(row.environment, main, writer, log)
        finally:
            os.close(writer)
        try:
            return _follow(process, task, lines, log, on_round)
        finally:
            _end(process)


def _start(
    environment: Mapping[str, str | None], main: str, writer: int, log: IO[bytes]
) -> "subprocess.Popen[bytes]":
    unset = [word for name, value in environment.items() if value is None for word in ("-u", name)]
    values = [f"{name}={value}" for name, value in environment.items() if value is not None]
    return subprocess.Popen(
        ["env", *unset, *values, sys.executable, "-m", main, str(writer)],
        cwd=Path(__file__).parents[3],  # as for every process of a sweep
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        pass_fds=(writer,),
        start_new_session=True,  # Ctrl-C reaches the sweep alone, which ends this one
    )


def _follow(
    process: "subprocess.Popen[bytes]",
    task: PeerTask,
    lines: IO[bytes],
    log: IO[bytes],
    on_round: Callable[[], None],
) -> SweepResult:
    if process.stdin is not None:
        with suppress(BrokenPipeError):  # it has ended: what follows says so
            process.stdin.write(msgspec.json.encode(task) + b"\n")
            process.stdin.flush()
    for line in lines:
        said = msgspec.json.decode(line, type=Said)
        if said.result is not None:
            return said.result
        if said.error:
            kind = vars(errors).get(said.error, KvxferError)
            raise kind(said.message)
        on_round()
    code = process.wait()
    raise PeerLost(f"the process of {task.case.peer} ended with status {code}{_last_words(log)}")


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    said = log.read().decode("utf-8", "replace").strip().splitlines()
    return f": {said[-1][-_QUOTED_CHARS:]}" if said else ""


def _end(process: "subprocess.Popen[bytes]") -> None:
    """It ends when its input does, at once; what does not is killed."""
    if process.stdin is not None:
        with suppress(BrokenPipeError):  # the task that it did not read
            process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
