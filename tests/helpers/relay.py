"""A TCP relay in front of a peer's channel, which can go silent as a broken network does."""

import select
import socket
import threading


class Relay:
    """Forwards connections to one address until it is cut; a cut keeps them open, and mute."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._mute: list[socket.socket] = []
        self._is_cut = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Forward nothing any more, and take no new connection through."""
        self._is_cut = True

    def heal(self) -> None:
        """Forward new connections again; what was cut stays so."""
        self._is_cut = False

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        for one in (self._listener, *self._pairs, *self._mute):
            one.close()

    def _run(self) -> None:
        while not self._stopping:
            if self._is_cut:
                self._mute += self._pairs
                self._pairs.clear()
            ready, _, _ = select.select([self._listener, *self._pairs], [], [], 0.02)
            for one in ready:
                if one is self._listener:
                    self._accept()
                elif one in self._pairs and not self._is_cut:
                    self._forward(one)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        if self._is_cut:
            self._mute.append(near)
            return
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        self._pairs |= {near: far, far: near}

    def _forward(self, one: socket.socket) -> None:
        other = self._pairs[one]
        try:
            data = one.recv(1 << 16)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        for end in (one, other):
            self._pairs.pop(end, None)
            end.close()
