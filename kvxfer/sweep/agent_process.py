"""How the sweep starts and ends the process of a far-side agent.

The child prints one line, the address of its channel, and ends when its standard input closes,
which the kernel does for us when the parent dies in whatever way.
"""

import logging
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from kvxfer.closing import Closing
from kvxfer.errors import KvxferError, NotAvailable, PeerLost
from kvxfer.sweep.agent import RemoteAgent

_START_S = 60.0
_END_S = 1.0
_log = logging.getLogger(__name__)


class AgentProcess(Closing):
    """A running child and the agent in it, which this object passes messages to.

    A context manager.
    """

    def __init__(self) -> None:
        """Start the child and wait for its address.

        Raises:
            NotAvailable: it ended or said nothing within a minute; its error is on stderr.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvxfer.sweep.agent_main"],
            # Python looks for -m where it stands: in a source tree, a kvxfer/ without _core.
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C reaches this process alone, which decides when the child may go.
            start_new_session=True,
        )
        try:
            self._agent = RemoteAgent(self._read_address())
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def call(self, message: msgspec.Struct) -> Any:
        """Send a message to the agent and wait for its reply.

        Raises:
            PeerLost: the child ended.
            KvxferError: what the agent raised.
        """
        try:
            return self._agent.call(message)
        except KvxferError:
            self.require_alive()
            raise

    def require_alive(self) -> None:
        """Check that the child runs.

        Raises:
            PeerLost: it ended.
        """
        code = self._process.poll()
        if code is not None:
            raise PeerLost(f"the peer process {self._process.pid} ended with status {code}")

    def close(self) -> None:
        """End the child: by closing its input, and after a second by killing it."""
        if hasattr(self, "_agent"):
            self._agent.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            _log.warning("peer process %d did not end by itself; killed", self._process.pid)
            self._process.kill()
            self._process.wait()
        if hasattr(self, "_watcher"):
            self._watcher.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _watch(self) -> None:
        """End a call that waits for a child which is gone."""
        if self._process.stdout is not None:
            self._process.stdout.read()
        self._process.wait()
        self._agent.close()

    def _read_address(self) -> str:
        stdout = self._process.stdout
        if stdout is None:
            raise NotAvailable("the peer process has no standard output")
        deadline = time.monotonic() + _START_S
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            ready = selector.select(deadline - time.monotonic())
        line = stdout.readline().strip() if ready else ""
        if not line.startswith("tcp://"):
            raise NotAvailable(
                f"the peer process said {line!r} instead of its address; see its error above"
            )
        return line
