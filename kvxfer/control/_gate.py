"""Decides which clients of a guarded server get in: libzmq asks here at each handshake (ZAP)."""

import logging

import zmq

from kvxfer.control import _sockets
from kvxfer.control.key import SharedKey

_log = logging.getLogger(__name__)
_ADDRESS = "inproc://zeromq.zap.01"
_NUM_PARTS = 7  # version, request id, domain, address, identity, mechanism, public key


class Gate:
    """Answers libzmq's questions of one context; served by the thread of the server."""

    def __init__(self, context: _sockets.Context, key: SharedKey) -> None:
        """Must be there before a socket of ``context`` is bound."""
        self._key = key
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_ADDRESS)

    def serve_waiting(self) -> None:
        """Answer one handshake."""
        try:
            parts = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        admitted = len(parts) == _NUM_PARTS and parts[5] == b"CURVE" and self._key.admits(parts[6])
        if not admitted:
            self.refused += 1
            if self.refused & (self.refused - 1) == 0:  # powers of two, as with foreign messages
                _log.warning("%d callers without the key refused so far", self.refused)
        status = [b"200", b"OK"] if admitted else [b"400", b"not the key of this server"]
        request_id = parts[1] if len(parts) > 1 else b""
        self.socket.send_multipart([b"1.0", request_id, *status, b"", b""])
