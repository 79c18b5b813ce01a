"""Ends the wait of a poll loop from another thread."""

import contextlib
import socket


class Wake:
    """A pair of sockets: one end is polled, a byte into the other ends the poll."""

    def __init__(self) -> None:
        """Not rung."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """What to poll for reading."""
        return self._reader.fileno()

    def ring(self) -> None:
        """End the wait that runs, or the next one; from any thread, also after `close`."""
        # Full: it has been rung already. Closed: nobody waits any more.
        with contextlib.suppress(OSError):
            self._writer.send(b"x")

    def clear(self) -> None:
        """Take note of all rings so far."""
        with contextlib.suppress(OSError):
            self._reader.recv(4096)

    def close(self) -> None:
        """Free both ends; by the thread that polls."""
        self._reader.close()
        self._writer.close()
