"""How a sender asks a receiver for pages: bounded, and one waiting request holds up no other."""

import threading
import time
from collections.abc import Callable

import zmq

from kvxfer.closing import Closing
from kvxfer.connectors.lmcache.wire import MAX_MESSAGE_BYTES
from kvxfer.errors import ControlTimeout, InvalidUsage, PeerLost

_SLICE_S = 0.2


class AllocCaller(Closing):
    """REQ sockets to alloc ports, one for each call that is open. Thread-safe.

    LMCache has one socket a receiver and asks again only when it was answered, so that a request
    which waits for pages holds up those that are to free them.
    """

    def __init__(self, is_lost: Callable[[str], bool], timeout_s: float) -> None:
        """Give a call up after ``timeout_s``, or as soon as its receiver has ended."""
        self._is_lost, self._timeout_s = is_lost, timeout_s
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._context.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._urls: dict[str, str] = {}
        self._idle: dict[str, list[zmq.Socket[bytes]]] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def know(self, receiver_id: str, host_and_port: str) -> None:
        """Where a receiver's alloc port is."""
        with self._lock:
            if self._urls.get(receiver_id) != host_and_port:
                self._urls[receiver_id] = host_and_port
                self._close_idle(receiver_id)

    def call(self, receiver_id: str, message: bytes) -> bytes:
        """The receiver's answer.

        Raises:
            PeerLost: it ended before it answered.
            ControlTimeout: no answer in time.
            InvalidUsage: it is not known, or this side is being closed.
        """
        socket = self._take(receiver_id)
        try:
            socket.send(message)
            self._wait(receiver_id, socket)
            answer = socket.recv()
        except BaseException:
            socket.close()  # a late answer must not be taken for the next one
            raise
        with self._lock:
            if self._is_closed:
                socket.close()
            else:
                self._idle[receiver_id].append(socket)
        return answer

    def close(self) -> None:
        """End the calls that are open; may be called more than once."""
        with self._lock:
            self._is_closed = True
            for receiver_id in list(self._idle):
                self._close_idle(receiver_id)
        # Sockets of open calls are closed by their threads, each within a slice.
        threading.Thread(target=self._context.term, daemon=True).start()

    def _wait(self, receiver_id: str, socket: "zmq.Socket[bytes]") -> None:
        deadline = time.monotonic() + self._timeout_s
        while not socket.poll(int(_SLICE_S * 1000)):
            if self._is_closed:
                raise InvalidUsage(f"closed while {receiver_id} was asked for pages")
            if self._is_lost(receiver_id):
                raise PeerLost(f"{receiver_id} ended while it was asked for pages")
            if time.monotonic() > deadline:
                raise ControlTimeout(
                    f"{receiver_id} gave no pages within {self._timeout_s} s; raise its "
                    "pd_buffer_size, or kvxfer.alloc_timeout_s here"
                )

    def _take(self, receiver_id: str) -> "zmq.Socket[bytes]":
        with self._lock:
            if self._is_closed or receiver_id not in self._urls:
                raise InvalidUsage(f"{receiver_id} was never met, or this side is closed")
            idle = self._idle.setdefault(receiver_id, [])
            if idle:
                return idle.pop()
            socket = self._context.socket(zmq.REQ)
            socket.connect(f"tcp://{self._urls[receiver_id]}")
            return socket

    def _close_idle(self, receiver_id: str) -> None:
        for socket in self._idle.pop(receiver_id, []):
            socket.close()
