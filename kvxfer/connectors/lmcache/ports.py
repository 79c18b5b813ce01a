"""LMCache's two request ports, served so that no message can make them deaf."""

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable

import zmq

from kvxfer.closing import Closing
from kvxfer.connectors.lmcache.wire import MAX_MESSAGE_BYTES
from kvxfer.errors import NotAvailable

_log = logging.getLogger(__name__)
_IDLE_MS = 100
_JOIN_S = 1.0
_Reply = Callable[[bytes], None]


class PortServer(Closing):
    """A thread that answers REQ and DEALER sockets on one port. A context manager.

    LMCache answers with REP, which must answer each message before the next: one that it cannot
    decode ends the port. A ROUTER owes nobody an answer, and holds several open.
    """

    def __init__(self, host_and_port: str, name: str) -> None:
        """Bind ``host:port``; the thread is started by :meth:`start`.

        Raises:
            NotAvailable: the port is taken, or the host is not of this machine.
        """
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            self._socket.bind(f"tcp://{host_and_port}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise NotAvailable(
                f"{name} cannot listen on {host_and_port} ({error}); give it a free port of this "
                "host"
            ) from error
        self._name, self._at = name, host_and_port
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and free the port; may be called more than once."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _log.warning("%s on %s did not stop within %s s", self._name, self._at, _JOIN_S)
            return
        self._context.destroy(linger=0)

    @abstractmethod
    def answer(self, sender: str, message: bytes, reply: _Reply) -> None:
        """Answer with ``reply``, now or in a later call of this thread; or raise."""

    def idle_ms(self) -> int:
        """Called between messages; returns after how many ms at most to be called again."""
        return _IDLE_MS

    def _run(self) -> None:
        while not self._is_closing.is_set():
            try:
                if self._socket.poll(self._wait_ms()):
                    self._receive()
            except zmq.ZMQError:
                if not self._is_closing.is_set():
                    _log.exception("%s on %s", self._name, self._at)
            except Exception as error:
                # One message is lost, not the port.
                _log.warning("%s on %s: %s", self._name, self._at, error)

    def _wait_ms(self) -> int:
        """`idle_ms`, whose errors must not keep messages from being read."""
        try:
            return self.idle_ms()
        except Exception:
            _log.exception("%s on %s", self._name, self._at)
            return _IDLE_MS

    def _receive(self) -> None:
        frames = self._socket.recv_multipart()
        head, payload = frames[:-1], frames[-1]

        def reply(data: bytes) -> None:
            self._socket.send_multipart([*head, data])

        self.answer(head[0].hex() if head else "", payload, reply)
