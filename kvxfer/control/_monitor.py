"""What befalls a socket's connections, as libzmq reports it."""

import itertools
import struct
from collections.abc import Iterator

import zmq

from kvxfer.control import _sockets

_EVENT = struct.Struct("=Hi")
_numbers = itertools.count()


class Monitor:
    """Events of one socket; used by the thread that uses the socket."""

    def __init__(self, context: _sockets.Context, watched: _sockets.Socket, events: int) -> None:
        """Report ``events``, a sum of ``zmq.EVENT_*``, of ``watched`` from now on."""
        address = f"inproc://kvxfer-monitor-{next(_numbers)}"
        self._watched = watched
        watched.monitor(address, events)
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        # Without a limit: libzmq's thread blocks on a full monitor, and all its sockets with it.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(address)

    def drain(self) -> Iterator[tuple[int, int]]:
        """The events since the last time, oldest first, each with its value."""
        while _sockets.has_message(self.socket):
            event, value = _EVENT.unpack(self.socket.recv())
            self.socket.recv()
            yield event, value

    def close(self) -> None:
        """Report no more; before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)
