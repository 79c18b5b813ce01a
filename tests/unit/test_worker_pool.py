"""The team of copy threads: at its limits, and where a process forks or cannot start threads."""

import subprocess
import sys

import pytest

from kvxfer import _core
from kvxfer.errors import InvalidUsage

TIMEOUT_S = 30.0

FORK = """
import os, warnings
import numpy as np
from kvxfer import _core
from kvxfer.errors import InvalidUsage
warnings.simplefilter("ignore")
pool = _core.WorkerPool(3)
source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
from kvxfer.layout import CopyPlan
from kvxfer.transport.host_copy import plan_tables
tables = plan_tables(CopyPlan.contiguous(source.ctypes.data, target.ctypes.data, 64))
child = os.fork()
if child == 0:
    try:
        _core.paged_copy_host(pool, tables, False)
    except InvalidUsage as error:
        del pool  # must not wait for threads that are not here
        os._exit(7 if "was forked from" in str(error) else 8)
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
_core.paged_copy_host(pool, tables, False)
assert (source == target).all()
"""

NO_THREADS = """
import resource
from kvxfer import _core
from kvxfer.errors import SystemCallError
_core.WorkerPool(1)
with open("/proc/self/statm") as text:
    used = int(text.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
try:
    _core.WorkerPool(200)
except SystemCallError as error:
    assert "could not start" in str(error) and "use fewer threads" in str(error), error
else:
    raise SystemExit("200 threads started in 64 MiB of address space")
"""


@pytest.mark.parametrize("program", [FORK, NO_THREADS], ids=["fork", "no-threads"])
def test_in_a_process_of_its_own(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, timeout=TIMEOUT_S, cwd="/")


@pytest.mark.parametrize("num_threads", [0, -1, 257])
def test_the_number_of_threads_is_bounded(num_threads: int) -> None:
    with pytest.raises(InvalidUsage, match=f"num_threads is {num_threads}; use 1 to 256"):
        _core.WorkerPool(num_threads)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_wait_without_time_returns_at_once(timeout_s: float) -> None:
    segment = _core.SharedSegment.create(4096)
    board = _core.CompletionBoard(segment.address, 1)
    assert not board.wait(0, 1, timeout_s)


def test_a_wait_without_end_sees_the_signal() -> None:
    segment = _core.SharedSegment.create(4096)
    board = _core.CompletionBoard(segment.address, 1)
    board.signal(0, 1)
    assert board.wait(0, 1, float("inf"))
