"""Server-sent events out of pieces of any size (WHATWG HTML, 9.2; the field ``data`` alone)."""

from collections.abc import Iterator

from kvxfer.errors import ProtocolMismatch

MAX_EVENT_BYTES = 16 << 20
EVENT_ENDS = (b"\n\n", b"\n\r\n")  # an empty line, after a line with either ending


class EventReader:
    """Puts events together; a piece may hold half of one, or many."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._num_bytes = 0  # of the event that has not ended

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that ends in ``piece``.

        Raises:
            ProtocolMismatch: an event is above `MAX_EVENT_BYTES`.
        """
        self._line += piece
        *lines, self._line = self._line.split(b"\n")
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_EVENT_BYTES:
            raise ProtocolMismatch(f"an event of a stream is above {MAX_EVENT_BYTES} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(bytes(line[5:].removeprefix(b" ")))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []
                self._num_bytes = 0


def event(data: bytes) -> bytes:
    """One event."""
    return b"data: " + data + b"\n\n"
