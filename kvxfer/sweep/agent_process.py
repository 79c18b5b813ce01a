"""How the sweep starts and ends the process of a far-side agent.

The child prints one line, the address of its channel, and ends when its standard input closes,
which the kernel does for us when the parent dies in whatever way.
"""

import logging
import selectors
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from kvxfer.closing import Closing
from kvxfer.descriptors import low_limit_hint
from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable, PeerLost
from kvxfer.sweep.agent import RemoteAgent

_START_S = 60.0
_END_S = 5.0  # giving back gigabytes of GPU memory takes seconds
_DEATH_S = 0.5
_log = logging.getLogger(__name__)


class AgentProcess(Closing):
    """A running child and the agent in it, which this object passes messages to.

    A context manager.
    """

    def __init__(self, *, wait: bool = True) -> None:
        """Start the child.

        Args:
            wait: for its address too; else :meth:`wait_ready` is called before all else.

        Raises:
            NotAvailable: it ended or said nothing within a minute; its error is on stderr.
        """
        self._agent: RemoteAgent | None = None
        self._ready_by_s = time.monotonic() + _START_S
        self._process = _start()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the child serves.

        Raises:
            NotAvailable: it ended or said nothing within a minute; it is closed then.
        """
        try:
            self._agent = RemoteAgent(self._read_address())
        except BaseException:
            self.close()
            raise
        self._watcher.start()

    def call(self, message: msgspec.Struct) -> Any:
        """Send a message to the agent and wait for its reply.

        Raises:
            PeerLost: the child ended.
            InvalidUsage: it is not ready.
            KvxferError: what the agent raised.
        """
        if self._agent is None:
            raise InvalidUsage("the peer process is not ready; call wait_ready first")
        try:
            return self._agent.call(message)
        except KvxferError as error:
            if isinstance(error, PeerLost):  # the connection ends before the kernel says why
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_DEATH_S)
            self.require_alive()
            raise

    def require_alive(self) -> None:
        """Check that the child runs.

        Raises:
            PeerLost: it ended.
        """
        code = self._process.poll()
        if code is not None:
            pid = self._process.pid
            raise PeerLost(f"the peer process {pid} ended with status {code}{low_limit_hint()}")

    def close(self) -> None:
        """End the child: by closing its input, and after five seconds by killing it.

        One that is not ready holds nothing yet that it must give back, and is killed at once.
        """
        if self._agent is None:
            self._process.kill()
        else:
            self._agent.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            _log.warning("peer process %d did not end by itself; killed", self._process.pid)
            self._process.kill()
            self._process.wait()
        if self._watcher.ident is not None:
            self._watcher.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _watch(self) -> None:
        """End a call that waits for a child which is gone."""
        if self._process.stdout is not None:
            self._process.stdout.read()
        self._process.wait()
        if self._agent is not None:
            self._agent.close()

    def _read_address(self) -> str:
        stdout = self._process.stdout
        if stdout is None:
            raise NotAvailable("the peer process has no standard output")
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            ready = selector.select(max(self._ready_by_s - time.monotonic(), 0.0))
        line = stdout.readline().strip() if ready else ""
        if line.startswith("tcp://"):
            return line
        with suppress(subprocess.TimeoutExpired):  # its output ends before the kernel says why
            code = self._process.wait(_DEATH_S)
            raise NotAvailable(
                f"the peer process {self._process.pid} ended with status {code} before it was "
                f"ready{low_limit_hint()}; see its error above, if it has one"
            )
        raise NotAvailable(
            f"the peer process {self._process.pid} said {line!r} instead of its address within "
            f"{_START_S:g} s"
        )


def _start() -> "subprocess.Popen[str]":
    # A child inherits what is blocked. Ctrl-C reaches this process alone, which decides when the
    # child may go: it has a session of its own, and what sends it SIGINT all the same is not heard.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "kvxfer.sweep.agent_main"],
            # Python looks for -m where it stands: in a source tree, a kvxfer/ without _core.
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
