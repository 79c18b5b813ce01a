"""What befalls a client's connection: that it ended, or that the peer refused it."""

import zmq

from kvxfer.control import _sockets
from kvxfer.control._monitor import Monitor

_REFUSALS = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the peer does not admit this key",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): (
        "the peer is another service, or one side has a key and the other has none"
    ),
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): (
        "the peer ends the connection, as one with another key does, or one side has a key and "
        "the other has none"
    ),
}
# The one that says for certain that trying again is of no use. Where the other side has another key
# or none, one of the two sides hangs up amid the handshake, as does a tunnel whose far end is not
# there yet: libzmq 4.3.5 tells the two apart at best by chance.
_FINAL = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_ENDED = int(zmq.EVENT_DISCONNECTED)


class ClientEvents:
    """The events of one socket; used by the thread that uses the socket.

    Attributes:
        socket: what to poll for reading: there is news.
        refusal: why the last handshake failed; empty where none has, or since `forget`.
        is_final: whether it is of no use to wait for the next.
    """

    def __init__(self, context: _sockets.Context, watched: _sockets.Socket) -> None:
        """Watch a socket that is not connected yet."""
        self._monitor = Monitor(context, watched, sum(_REFUSALS) + _ENDED)
        self.socket = self._monitor.socket
        self.forget()

    def forget(self) -> None:
        """A message went out, so whatever was refused before is over."""
        self.refusal = ""
        self.is_final = False

    def drain(self) -> bool:
        """Take note of the news; returns whether a connection has ended."""
        has_ended = False
        for event, _ in self._monitor.drain():
            if event == _ENDED:
                has_ended = True
            else:
                self.refusal = _REFUSALS[event]
                self.is_final = event == _FINAL
        return has_ended

    def close(self) -> None:
        """Report no more; before the watched socket is closed."""
        self._monitor.close()
