"""A thread that is amid a call of the core when the interpreter goes does not abort the process."""

import subprocess
import sys

PROGRAM = """
import threading, time
from kvxfer.sweep.cases import raw_layout
from kvxfer.sweep.patterned_cache import PatternedCache

pool = PatternedCache(raw_layout(1 << 20, 2), 8, memory="private", device=-1, num_threads=1)
begun = threading.Event()

def fill():
    begun.set()
    while True:
        pool.fill(1)

threading.Thread(target=fill, daemon=True).start()
begun.wait()
time.sleep(0.1)  # by then it is in a fill nearly always
"""


def test_a_daemon_thread_amid_a_call_at_exit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert (done.returncode, done.stderr) == (0, "")
